"""Shared by the TensorFlow scenarios: a small model, its training step, and checks.

The checks compare all ranks.
"""

import horovod.tensorflow as hvd
import numpy as np
import scenario_runner
import tensorflow as tf

import deepreduce_hvd as dr

#: weights and biases, above and below ``dense_below``; only two layers, because tracing takes most
#: of the time of the tests
SIZES = ((48, 64), (64, 3))
RATE = 0.1


def model(seed=0, dtype=tf.float32, sizes=SIZES):
    """Return [(name, variable)] of two linear layers."""
    random = np.random.default_rng(seed)
    named = []
    for number, (rows, columns) in enumerate(sizes):
        named.append(
            (
                f"kernel{number}",
                tf.Variable(
                    tf.cast(random.standard_normal((rows, columns)) / 8, dtype),
                    name=f"kernel{number}",
                ),
            )
        )
        named.append(
            (f"bias{number}", tf.Variable(tf.zeros([columns], dtype), name=f"bias{number}"))
        )
    return named


def compressor_of(named, codec=None, memory=None, dense_below=50, **options):
    return dr.Compressor(
        codec or dr.Codec(dr.TopK(0.05)),
        memory,
        parameters=named,
        dense_below=dense_below,
        **options,
    )


#: From three ranks on, Horovod's own sums of uncompressed gradients depend on which of them it
#: happens to fuse. Sums of payloads do not.
ALL_COMPRESSED = {"dense_below": 0}


def variables(named):
    return [variable for _, variable in named]


def batch(step, rank=None, dtype=tf.float32):
    random = np.random.default_rng(1000 * step + (hvd.rank() if rank is None else rank))
    return tf.cast(random.standard_normal((16, 48)), dtype)


def loss_of(named, images):
    for number in range(len(SIZES)):
        images = images @ named[2 * number][1] + named[2 * number + 1][1]
        images = tf.tanh(images) if number < len(SIZES) - 1 else images
    return tf.reduce_mean(images**2)


def local_gradients(named, images):
    with tf.GradientTape() as tape:
        loss = loss_of(named, images)
    return tape.gradient(loss, variables(named))


def make_step(named, compressor, **options):
    """Return a training step with DistributedGradientTape, which returns the reduced gradients."""

    def step(images):
        with tf.GradientTape() as tape:
            loss = loss_of(named, images)
        gradients = hvd.DistributedGradientTape(tape, compression=compressor, **options).gradient(
            loss, variables(named)
        )
        for variable, gradient in zip(variables(named), gradients):
            variable.assign_sub(tf.cast(RATE, variable.dtype) * tf.cast(gradient, variable.dtype))
        return gradients

    return step


def count(graph, kind):
    """Return the number of operations of a kind in a graph and its functions."""
    nodes = [
        node for function in graph.as_graph_def().library.function for node in function.node_def
    ] + list(graph.as_graph_def().node)
    return sum(node.op == kind for node in nodes)


class Version1:
    """A graph of tf.compat.v1, whose optimizers and session are those of Horovod's examples."""

    def __init__(self):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.images = tf.compat.v1.placeholder(tf.float32, [16, 48])

    def training(self, named, compressor):
        """Return the operation of a step of a model that was made in this graph."""
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(RATE), compression=compressor
        )
        return optimizer.minimize(loss_of(named, self.images), var_list=variables(named))

    def session(self):
        """Return a session in which all variables of the graph are initialized."""
        with self.graph.as_default():
            start = [
                tf.compat.v1.global_variables_initializer(),
                tf.compat.v1.local_variables_initializer(),
            ]
        session = tf.compat.v1.Session(graph=self.graph)
        session.run(start)
        return session


def train(
    steps, codec=None, memory=None, eager=False, compressor=None, named=None, start=0, **options
):
    named = named or model()
    compressor = compressor or compressor_of(named, codec, memory)
    step = make_step(named, compressor, **options)
    # without AutoGraph, whose conversion takes a third of the time: nothing here branches on
    # tensors
    step = step if eager else tf.function(step, autograph=False)
    for number in range(start, start + steps):
        step(batch(number))
        assert_equal_everywhere(variables(named), f"step {number}")
    return named, compressor


def assert_equal_everywhere(tensors, what):
    own = tf.concat([tf.reshape(tf.cast(tensor, tf.float64), [-1]) for tensor in tensors], 0)
    gathered = hvd.allgather(own[None], name="check").numpy()
    for rank, other in enumerate(gathered):
        assert np.array_equal(other, gathered[0]), f"{what}: rank {rank} differs from rank 0"


def assert_close(one, other, rtol=1e-6, atol=1e-7):
    for (name, first), (_, second) in zip(one, other):
        np.testing.assert_allclose(
            first.numpy(), second.numpy(), rtol=rtol, atol=atol, err_msg=name
        )


def assert_same(one, other):
    for (name, first), (_, second) in zip(one, other):
        np.testing.assert_array_equal(first.numpy(), second.numpy(), err_msg=name)


def sum_over_ranks(array):
    return hvd.allreduce(tf.constant(np.asarray(array, np.float64)), op=hvd.Sum, name="sum").numpy()


def run_all(namespace, directory):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    scenario_runner.run_all(
        namespace, directory, hvd, barrier=lambda: hvd.allreduce(tf.zeros([1]), name="barrier")
    )
