"""The numbers that describe a codec to the operators, as a function of the graph's step."""

import numpy as np
import tensorflow as tf


class CodecNumbers:
    """The 20 numbers of a codec of built-in stages and a memory.

    A sparsifier's schedule changes only some of them. The compressor stores those once for all
    steps, and a graph selects the numbers of its step. So a graph does not grow with the length of
    the schedule, and neither does its cost per gradient.
    """

    def __init__(self, codec, memory):
        steps = codec.sparsifier.schedule_steps
        sparsifier = np.array([codec.sparsifier.fields(step) for step in range(steps + 1)])
        #: the numbers after the end of the schedule, (1, 20); they describe how to decode payloads
        #: of any step
        self.last = np.array([codec.fields(memory, steps)])
        self._changing = np.flatnonzero((sparsifier != sparsifier[-1]).any(axis=0))
        # graphs refer to an eager tensor of this size and do not copy it
        self._schedule = tf.constant(sparsifier[:, self._changing]) if self._changing.size else None
        self._steps = steps

    def at(self, step):
        """Return the numbers at a step, (1, 20) float64; ``step`` is a scalar tensor."""
        if self._schedule is None:
            return self.last
        row = tf.gather(self._schedule, tf.minimum(step, self._steps))
        return tf.tensor_scatter_nd_update(self.last[0], self._changing[:, None], row)[None]

    def table(self):
        """Return the numbers at all steps of the schedule, then the last ones, (rows, 20)."""
        table = np.repeat(self.last, self._steps + 1, axis=0)
        if self._schedule is not None:
            table[:, self._changing] = self._schedule
        return table
