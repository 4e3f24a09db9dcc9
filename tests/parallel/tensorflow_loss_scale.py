"""Test loss scales, and optimizers that change the scale, on TensorFlow.

Run by tensorflow_overflow.py.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from codecs_table import MEMORIES
from scenario_runner import refused, sample
from tensorflow_overflow_tools import (
    SHAPES,
    coefficients,
    compressor_of,
    made,
    make_step,
    residuals,
)
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr

#: number of batches in the Keras scenarios, and number of the first ones with Inf on one rank
STEPS, VOID = 10, 3


def scenario_memories_follow_the_loss_scale(directory):
    """A loss scale that changes by powers of two changes nothing else.

    The scale is a variable, and a void step follows each step.
    """
    for memory in sample(hvd.size(), MEMORIES.values()):
        trained = []
        for scaled in (False, True):
            network = made()
            scale = tf.Variable(1.0)
            options = {"loss_scale": lambda: scale} if scaled else {}
            compressor = compressor_of(network, memory=memory, **options)
            step = make_step(network, compressor, op=hvd.Average)
            for number in range(6):
                scale.assign(2.0 ** (3 * number % 7) if scaled else 1.0)
                gradients = step(
                    {name: value * scale for name, value in coefficients(number, network).items()}
                )
                for name, gradient in gradients.items():
                    network[name].assign_sub(gradient / scale)
                if scaled:
                    step(
                        {
                            name: value * np.nan
                            for name, value in coefficients(number, network).items()
                        }
                    )
                    assert (
                        compressor.state_dict()["parameters"]["quiet"]["loss_scale"]
                        == scale.numpy()
                    )
            assert_equal_everywhere(network.values(), f"{memory} {scaled}")
            trained.append(network)
        for name in SHAPES:
            one, other = (network[name].numpy() for network in trained)
            # with three ranks, the order in which Horovod's ring adds depends on its buffer
            if compressor.stats()[name]["path"] == "dense":
                np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=f"{memory} {name}")
            else:
                np.testing.assert_array_equal(one, other, err_msg=f"{memory} {name}")


class _Batches:
    """Batches for a linear model. The first ones have Inf on the last rank."""

    def __init__(self):
        truth = np.random.default_rng(7).standard_normal((48, 40))
        self.inputs = (
            np.random.default_rng(hvd.rank()).standard_normal((STEPS * 16, 48)).astype(np.float32)
        )
        self.answers = (self.inputs @ truth).astype(np.float32)
        if hvd.rank() == hvd.size() - 1:
            self.inputs[: VOID * 16, 3] = np.inf


def scenario_keras_fit_with_a_loss_scale_optimizer(directory):
    """Void steps, and the lower loss scale after them, do not change the training."""
    batches = _Batches()

    def fit(first, scale):
        network = tf.keras.Sequential(
            [tf.keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros")]
        )
        network.build([None, 48])
        options = {"loss_scale": lambda: network.optimizer.loss_scale} if scale else {}
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables, **options
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.01), compression=compressor
        )
        if scale:
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=scale)
        network.compile(optimizer, loss="mse")
        network.fit(
            batches.inputs[first * 16 :],
            batches.answers[first * 16 :],
            batch_size=16,
            shuffle=False,
            verbose=0,
        )
        assert_equal_everywhere(network.trainable_variables, f"fit {scale}")
        return network, compressor

    scaled, compressor = fit(0, 2.0**15)
    plain, other = fit(VOID, None)
    np.testing.assert_allclose(
        scaled.get_weights()[0], plain.get_weights()[0], rtol=1e-5, atol=1e-7
    )
    scale = float(scaled.optimizer.loss_scale.numpy())
    assert scale == 2.0 ** (15 - VOID)
    (kept,), (expected,) = residuals(compressor).values(), residuals(other).values()
    np.testing.assert_allclose(
        kept / scale, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def scenario_two_scales_need_two_compressors(directory):
    """Two models that take turns have scales of their own, as a GAN may."""
    batches = _Batches()
    batches.inputs[: VOID * 16] = 1
    for shared in (True, False):
        networks = [
            tf.keras.Sequential([tf.keras.layers.Dense(40, use_bias=False)]) for _ in range(2)
        ]
        for network in networks:
            network.build([None, 48])
        both = [network.trainable_variables[0] for network in networks]
        named = list(zip("ab", both))
        first = dr.Compressor(
            parameters=named if shared else named[:1],
            loss_scale=lambda networks=networks: networks[0].optimizer.loss_scale,
        )
        second = first
        if not shared:
            second = dr.Compressor(
                parameters=named[1:],
                loss_scale=lambda networks=networks: networks[1].optimizer.loss_scale,
            )
        for place, compressor in enumerate((first, second)):
            optimizer = hvd_keras.DistributedOptimizer(
                tf.keras.optimizers.SGD(0.01), f"own{shared}{place}",
                compression=compressor.bound_to([both[place]]),
            )  # fmt: skip
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
                optimizer, initial_scale=16.0, dynamic_growth_steps=2 if place == 0 else 1000
            )
            networks[place].compile(optimizer, loss="mse")

        def train(networks=networks):
            for step in range(4):
                part = slice(16 * step, 16 * step + 16)
                for network in networks:
                    network.train_on_batch(batches.inputs[part], batches.answers[part])

        if shared:
            with refused("expected the scale 16 of the LossScaleOptimizer .*, got 32, of another"):
                train()
        else:
            train()
            assert [float(one.optimizer.loss_scale) for one in networks] == [64, 16]


def scenario_a_model_that_is_compiled_again_with_another_scale(directory):
    """The residual follows the scale of the new optimizer, though Horovod keeps its graph."""
    batches = _Batches()

    def train(scales):
        network = tf.keras.Sequential(
            [tf.keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros")]
        )
        network.build([None, 48])
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)),
            parameters=network.trainable_variables,
            loss_scale=lambda: network.optimizer.loss_scale,
        )
        for scale in scales:
            optimizer = hvd_keras.DistributedOptimizer(
                tf.keras.optimizers.SGD(0.01), compression=compressor
            )
            network.compile(
                tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=scale),
                loss="mse",
            )
            rows = slice(VOID * 16, None)
            network.fit(batches.inputs[rows], batches.answers[rows], batch_size=16, verbose=0)
            (part,) = compressor.state_dict()["parameters"].values()
            assert part["loss_scale"] == scale, part["loss_scale"]
        return network.get_weights()[0]

    tf.keras.utils.set_random_seed(0)
    changed = train((1024.0, 8.0))
    tf.keras.utils.set_random_seed(0)
    np.testing.assert_array_equal(changed, train((1024.0, 1024.0)))


def scenario_an_optimizer_without_a_scale_yet(directory):
    """The loss scale of Keras 3 exists after ``build``, so an eager step before it is refused."""
    import keras

    network = made()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    compressor = compressor_of(network, loss_scale=lambda: optimizer.dynamic_scale)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable) for variable in network.values()])
    try:
        hvd.DistributedGradientTape(tape, compression=compressor).gradient(
            loss, list(network.values())
        )
    except tf.errors.OpError as error:
        assert "got AttributeError: " in str(error) and "optimizer.build(" in str(error), error
    else:
        raise AssertionError("a loss scale that does not exist was taken")


def scenario_keras_without_loss_scale_is_refused(directory):
    """A dynamic scale needs ``loss_scale=``.

    A scale that never changes, or a compressor without memory, is accepted without it.
    """
    batches = _Batches()
    for dynamic, memory in ((True, dr.Residual()), (False, dr.Residual()), (True, dr.NoMemory())):
        network = tf.keras.Sequential([tf.keras.layers.Dense(40, use_bias=False)])
        network.build([None, 48])
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), memory, parameters=network.trainable_variables
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.01), compression=compressor
        )
        network.compile(
            tf.keras.mixed_precision.LossScaleOptimizer(
                optimizer, dynamic=dynamic, initial_scale=8.0
            ),
            loss="mse",
        )
        try:
            network.fit(batches.inputs[-32:], batches.answers[-32:], batch_size=16, verbose=0)
        except Exception as error:  # AutoGraph wraps our error in its own
            assert (
                dynamic
                and memory == dr.Residual()
                and "give Compressor loss_scale=lambda: model.optimizer.loss_scale" in str(error)
            ), error
        else:
            assert not dynamic or memory == dr.NoMemory()


def scenario_a_model_that_is_compiled_again_without_loss_scale_is_refused(directory):
    """A prepared optimizer notices the scale, though Horovod keeps the graph of the first one."""
    batches = _Batches()
    network = tf.keras.Sequential([tf.keras.layers.Dense(40, use_bias=False)])
    network.build([None, 48])
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables)

    def fit(around):
        optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.9), compressor)
        optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compressor)
        network.compile(around(optimizer), loss="mse")
        network.fit(batches.inputs[-32:], batches.answers[-32:], batch_size=16, verbose=0)

    fit(lambda optimizer: optimizer)
    try:
        fit(tf.keras.mixed_precision.LossScaleOptimizer)
    except Exception as error:  # AutoGraph wraps our error in its own
        assert "give Compressor loss_scale=lambda: model.optimizer.loss_scale" in str(error), error
    else:
        raise AssertionError("a loss scale that the residual does not follow was taken")


def scenario_keras_3_with_a_loss_scale_optimizer(directory):
    import keras

    batches = _Batches()

    def train(first, scale):
        network = keras.Sequential(
            [
                keras.layers.Input((48,)),
                keras.layers.Dense(40, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        optimizer = keras.optimizers.SGD(0.01)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
        optimizer.build(network.trainable_variables)
        options = {"loss_scale": lambda: optimizer.dynamic_scale} if scale else {}
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables, **options
        )

        @tf.function(autograph=False)
        def step(inputs, answers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((network(inputs, training=True) - answers) ** 2)
                loss = optimizer.scale_loss(loss) if scale else loss
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            gradients = tape.gradient(
                loss, [variable.value for variable in network.trainable_variables]
            )
            optimizer.apply(gradients, network.trainable_variables)

        for number in range(first, STEPS):
            rows = slice(16 * number, 16 * (number + 1))
            step(tf.constant(batches.inputs[rows]), tf.constant(batches.answers[rows]))
        weights = network.get_weights()
        assert_equal_everywhere([tf.constant(one) for one in weights], f"keras {scale}")
        return weights[0], optimizer

    scaled, optimizer = train(0, 2.0**15)
    assert float(optimizer.dynamic_scale.numpy()) == 2.0 ** (15 - VOID)
    plain, _ = train(VOID, None)
    np.testing.assert_allclose(scaled, plain, rtol=1e-5, atol=1e-7)


def scenario_a_loss_scale_that_is_none(directory):
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        network = made()
        step = make_step(network, compressor_of(network, loss_scale=lambda: scale))
        try:
            step(coefficients(0, network))
        except tf.errors.OpError as error:
            assert f"expected a function that returns a finite number above 0, got {scale}" in str(
                error
            )
        else:
            raise AssertionError(f"a loss scale of {scale} was taken")
