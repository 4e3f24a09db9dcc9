"""Test which gradients are one step of an optimizer with a loss scale, on TensorFlow.

Run by tensorflow_overflow.py.
"""

import importlib
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from scenario_runner import refused
from tensorflow_overflow_tools import ONE, coefficients, compressor_of, made, residuals
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow

TWO_CALLS = r"of two calls, as of gradient\(\) of hvd.DistributedGradientTape"


def scenario_gradients_of_two_calls_are_no_step_of_a_scaled_optimizer(directory):
    """If one of them is skipped, the other is too, but it is not known to the compressor."""
    for module in (tf.keras, importlib.import_module("keras")):
        network = made(shapes={"quiet": (40, 30), "loud": (40, 30)})
        compressor = compressor_of(network, **ONE)
        optimizer = dr.prepare(module.optimizers.SGD(0.1, momentum=0.5), compressor)
        variables = list(network.values())

        def gradients(wanted, tape_of, network=network, variables=variables):
            found = []
            for name, variable in network.items():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * wanted[name])
                found += tape_of(tape).gradient(loss, [variable])
            return zip(found, variables)

        @tf.function
        def apart(wanted):
            reducing = lambda tape: hvd.DistributedGradientTape(tape, compression=compressor)  # noqa: E731
            optimizer.apply_gradients(gradients(wanted, reducing))

        @tf.function
        def together(wanted):
            found, _ = zip(*gradients(wanted, lambda tape: tape))
            reduced = dr.tensorflow.allreduce_gradients(found, variables, compressor)
            if tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in reduced]):
                optimizer.apply_gradients(zip(reduced, variables))

        with refused(TWO_CALLS):
            apart(coefficients(0, network))
        together(coefficients(1, network))
        before, values = residuals(compressor), [one.numpy() for one in variables]
        together(coefficients(2, network, {"loud": np.nan}))
        assert all(np.array_equal(one.numpy(), old) for one, old in zip(variables, values))
        for name, residual in residuals(compressor).items():
            np.testing.assert_array_equal(residual, before[name], err_msg=name)


def scenario_gradients_of_two_calls_are_found_though_graphs_are_kept(directory):
    """The graph that was traced last has reduced the gradients together."""
    import keras

    def check(around, in_graph):
        network = made(shapes={"quiet": (40, 30), "loud": (60, 30)})
        variables = [keras.Variable(one, name=name) for name, one in network.items()]
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        optimizer = around(inner)
        optimizer.build(variables)
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=variables, dense_below=50, **ONE
        )
        dr.prepare(inner, compressor)
        wanted = coefficients(0, network)

        def reduced(*names):
            sources = [one.value for one in variables if one.name in names]
            with tf.GradientTape() as tape:
                products = [one * wanted[name] for one, name in zip(sources, names)]
                loss = tf.add_n([tf.reduce_sum(product) for product in products])
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            return tape.gradient(loss, sources)

        def update(gradients):
            optimizer.apply(gradients, variables)

        update = tf.function(update, autograph=False) if in_graph else update
        reduced("quiet"), reduced("loud")
        update(reduced("quiet", "loud"))
        with refused(TWO_CALLS):
            update(reduced("quiet") + reduced("loud"))
        update(reduced("quiet", "loud"))

    for around in (lambda inner: inner, keras.optimizers.LossScaleOptimizer):
        for in_graph in (False, True):
            check(around, in_graph)


def scenario_tasks_that_take_turns_share_variables(directory):
    """Each task's step has other variables, and a smaller batch traces only the program again."""
    import keras

    def train(module, in_graph):
        shapes = {"trunk": (48, 60), "first": (60, 50), "second": (60, 30)}
        network = made(shapes=shapes)
        for number, one in enumerate(network.values()):
            one.assign(tf.random.stateless_normal(one.shape, [0, number]) / 10)
        trunk, *heads = network.values()
        compressor = compressor_of(network, **ONE)
        optimizer = dr.prepare(module.optimizers.SGD(0.01, momentum=0.9), compressor)
        if module is tf.keras:
            optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compressor)
        optimizer.build(list(network.values()))

        def step(inputs, head):
            sources = [trunk, head]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(inputs @ trunk) @ head) ** 2)
            if module is tf.keras:
                optimizer.minimize(loss, sources, tape=tape)
            else:
                tape = hvd.DistributedGradientTape(tape, compression=compressor)
                optimizer.apply_gradients(zip(tape.gradient(loss, sources), sources))

        tasks = [tf.function(step, autograph=False) if in_graph else step for _ in heads]
        random = np.random.default_rng(hvd.rank())
        for batch in (16, 16, 9):
            for task, head in zip(tasks, heads):
                task(tf.constant(random.standard_normal((batch, 48)), tf.float32), head)
        assert_equal_everywhere(network.values(), f"{module.__name__} {in_graph}")

    for module in (tf.keras, keras):
        for in_graph in (False, True):
            train(module, in_graph)


def scenario_xla_compiles_the_update_of_a_step_with_a_loss_scale(directory):
    network = made(shapes={"quiet": (40, 30), "loud": (60, 30)})
    variables = list(network.values())
    compressor = compressor_of(network, **ONE)
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.1, momentum=0.5), compressor)
    optimizer.build(variables)

    @tf.function(jit_compile=True)
    def update(gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    wanted = coefficients(0, network)
    reduced = dr.tensorflow.allreduce_gradients([*wanted.values()], variables, compressor)
    update(reduced)
    for variable, gradient in zip(variables, reduced):
        np.testing.assert_allclose(variable.numpy(), -0.2 * gradient.numpy(), rtol=1e-6)
