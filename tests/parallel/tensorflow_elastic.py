"""Train as one worker of an elastic job on TensorFlow, until a file tells it to stop.

Started by test_tensorflow_elastic.py under horovodrun.
"""

import pathlib
import signal
import sys

import elastic_worker
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_tools import (
    assert_equal_everywhere,
    batch,
    compressor_of,
    make_step,
    model,
    sum_over_ranks,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.tensorflow import elastic as tensorflow_elastic

#: {name of settings: the settings of the compressor}
SETTINGS = {
    "allgather": {"communicator": dr.Allgather()},
    "doubling": {"communicator": dr.RecursiveDoubling()},
    "auto": {"schedule": "auto"},
}


class Network:
    """The attributes of a Keras model that an elastic state uses."""

    def __init__(self, named):
        self.variables = variables(named)


class Optimizer:
    def variables(self):
        return []


def main(directory, settings, kind):
    directory = pathlib.Path(directory)
    elastic_worker.announce(directory)
    hvd.init()
    named = model(sizes=((48, 64), (64, elastic_worker.FEWEST_ELEMENTS)))
    # RandomK and QSGD depend on the step counter: a joining rank must get it
    codec = dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))
    compressor = compressor_of(named, codec, **settings)
    reduced_step = tf.function(make_step(named, compressor))
    reduced_step = dr.tensorflow.scheduled(compressor)(reduced_step)
    if kind == "stock":  # Horovod's own state, without the compressor
        state = hvd.elastic.TensorFlowKerasState(Network(named), Optimizer(), step=0)
    else:
        state = tensorflow_elastic.TensorFlowKerasState(
            Network(named), Optimizer(), compressor=compressor, step=0, committed=None
        )

    def step(number):
        reduced_step(batch(number))
        assert_equal_everywhere(variables(named), f"step {number + 1}")

    def snapshot():
        flat = [variable.numpy().reshape(-1) for variable in variables(named)]
        memories = [one["memory"] for one in compressor.state_dict()["parameters"].values()]
        kept = [part.reshape(-1) for memory in memories for part in memory.values()]
        return np.concatenate(flat), sum_over_ranks(np.concatenate(kept)) / hvd.size()

    def as_rank_0(number):
        return hvd.broadcast(tf.constant(number, tf.int64), 0, name="commits")

    worker = elastic_worker.Worker(directory, hvd, step, snapshot, as_rank_0)

    @hvd.elastic.run
    def train(state):
        if kind == "ours" and state.committed is not None:
            worker.note_start(state)
        worker.train(state)
        return "enough"

    assert train(state) == "enough", "training ended in silence"
    worker.finish()


if __name__ == "__main__":
    # trains until the file tells it to stop; ends even if the test is killed
    signal.alarm(900)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    main(sys.argv[1], SETTINGS[sys.argv[2]], sys.argv[3])
