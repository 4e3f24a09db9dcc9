"""Train as one worker of an elastic job on TensorFlow, until a file tells it to stop.

Started by test_tensorflow_elastic.py under horovodrun.
"""

import os
import pathlib
import signal
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # its loss scale is not in the optimizer's variables

import elastic_worker
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_tools import (
    RATE,
    assert_equal_everywhere,
    batch,
    compressor_of,
    loss_of,
    make_step,
    model,
    sum_over_ranks,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.tensorflow import elastic as tensorflow_elastic

#: {name of settings: the settings of the compressor}
SETTINGS = {
    "allgather": {"communicator": dr.Allgather()},
    "doubling": {"communicator": dr.RecursiveDoubling()},
    "auto": {"schedule": "auto"},
    "loss scale": {},
}
#: steps after which a dynamic loss scale grows
_GROWTH_STEPS = 10


class Network:
    """The attributes of a Keras model that an elastic state uses."""

    def __init__(self, named):
        self.variables = variables(named)


class Optimizer:
    def variables(self):
        return []


def _step_with_a_table(named, compressor):
    """Return a training step of the layers, and of a table whose rows a batch chooses."""
    layers, table = named[:-1], named[-1][1]

    def step(images):
        with tf.GradientTape() as tape:
            rows = tf.cast(100 * images[:, 0], tf.int64) % 400
            loss = loss_of(layers, images) + tf.reduce_mean(tf.gather(table, rows) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=True)
        for variable, gradient in zip(variables(named), tape.gradient(loss, variables(named))):
            variable.assign_sub(RATE * gradient)

    return step


def _scaled_step(named, compressor, optimizer):
    """Return a training step of an optimizer with a loss scale."""

    def step(images):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_of(named, images))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables(named)))
        optimizer.apply_gradients(zip(gradients, variables(named)))

    return step


def main(directory, settings, kind):
    directory = pathlib.Path(directory)
    elastic_worker.announce(directory)
    hvd.init()
    named = model(sizes=((48, 64), (64, elastic_worker.FEWEST_ELEMENTS)))
    # RandomK and QSGD depend on the step counter: a joining rank must get it
    codec = dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))
    optimizer = Optimizer()
    if settings == SETTINGS["loss scale"]:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.SGD(RATE), initial_scale=2.0, dynamic_growth_steps=_GROWTH_STEPS
        )
        optimizer.build(variables(named))  # a joining rank gets its variables
        compressor = compressor_of(named, codec, loss_scale=lambda: optimizer.loss_scale)
        reduced_step = tf.function(_scaled_step(named, compressor, optimizer), autograph=False)
    elif settings == SETTINGS["allgather"]:
        table = tf.Variable(np.random.default_rng(1).standard_normal((400, 8), np.float32))
        named.append(("table", table))  # which new ranks do not know as one
        compressor = compressor_of(named, {"kernel*": codec, "bias*": codec}, **settings)
        reduced_step = tf.function(_step_with_a_table(named, compressor), autograph=False)
    else:
        compressor = compressor_of(named, codec, **settings)
        reduced_step = tf.function(make_step(named, compressor), autograph=False)
    reduced_step = dr.tensorflow.scheduled(compressor)(reduced_step)
    if kind == "stock":  # Horovod's own state, without the compressor
        state = hvd.elastic.TensorFlowKerasState(Network(named), optimizer, step=0)
    else:
        state = tensorflow_elastic.TensorFlowKerasState(
            Network(named), optimizer, compressor=compressor, step=0, committed=None
        )

    def step(number):
        reduced_step(batch(number))
        assert_equal_everywhere(variables(named), f"step {number + 1}")
        if settings == SETTINGS["loss scale"]:
            assert_equal_everywhere([optimizer.loss_scale], f"scale of step {number + 1}")
            assert optimizer.loss_scale > 1
        if "table" in dict(named):
            assert names_of(compressor.adapter.slots) == ["table"], f"step {number}"

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
