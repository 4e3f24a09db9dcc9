"""The numbers by which the operators know a codec, at a step that only the running graph knows."""

import numpy as np
import tensorflow as tf


class CodecNumbers:
    """The 20 numbers of a codec of built-in stages, with a memory.

    A schedule changes few of them: those are kept once a compressor, for all its steps, and a graph
    picks a step's. What graphs themselves hold does not grow with the schedule, nor does what they
    hold for one more gradient.
    """

    def __init__(self, codec, memory):
        steps = codec.sparsifier.schedule_steps
        sparsifier = np.array([codec.sparsifier.fields(step) for step in range(steps + 1)])
        #: those of after the schedule, (1, 20); how payloads are decoded follows from them at any
        #: step
        self.last = np.array([codec.fields(memory, steps)])
        self._changing = np.flatnonzero((sparsifier != sparsifier[-1]).any(axis=0))
        # graphs refer to an eager tensor of this size, and copy no number of it
        self._schedule = tf.constant(sparsifier[:, self._changing]) if self._changing.size else None
        self._steps = steps

    def at(self, step):
        """(1, 20) float64, by the step as a scalar tensor."""
        if self._schedule is None:
            return self.last
        row = tf.gather(self._schedule, tf.minimum(step, self._steps))
        return tf.tensor_scatter_nd_update(self.last[0], self._changing[:, None], row)[None]
