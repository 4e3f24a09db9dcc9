"""Test optimizers of Keras on stock Horovod. Run by tensorflow_scenarios.py."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import contextlib
import io
import warnings
from unittest import mock

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from tensorflow_tools import assert_equal_everywhere

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow


def made(kind=tf.keras.Sequential, **options):
    """Return a model with one large variable, and its compressor."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(3)
    network = kind([tf.keras.layers.Input((48,)), tf.keras.layers.Dense(40, use_bias=False)])
    codec = dr.Codec(dr.TopK(0.1))
    return network, dr.Compressor(codec, parameters=network.trainable_variables, **options)


class OwnStep(tf.keras.Sequential):
    """A model whose step calls apply_gradients, which Horovod's optimizer does not reduce in."""

    def train_step(self, data):
        inputs, answers = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(answers, self(inputs, training=True))
        tape = self.tape_of(tape)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}

    def tape_of(self, tape):
        return tape


def fit(network, optimizer, compressor, name=None):
    """Train for four steps, and return the warnings of the package."""
    optimizer = hvd_keras.DistributedOptimizer(optimizer, name, compression=compressor)
    return fit_as_it_is(network, optimizer)


def fit_as_it_is(network, optimizer):
    """Do the same without Horovod's optimizer around this one."""
    random = np.random.default_rng(hvd.rank())
    inputs = random.standard_normal([64, 48]).astype(np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        network.compile(optimizer, loss="mse")
        network.fit(inputs, inputs[:, :40], batch_size=16, shuffle=False, verbose=0)
    texts = [str(one.message) for one in said]
    return [text for text in texts if text.startswith("deepreduce_hvd: ")]


def scenario_legacy_optimizers(directory):
    """They train, and a warning names the class that can be prepared in their place."""
    legacy = tf.keras.optimizers.legacy
    for optimizer, warned in (
        (legacy.SGD(0.01, momentum=0.9), True),
        (legacy.SGD(0.01), False),
        (legacy.Adam(0.01), True),
        (legacy.RMSprop(0.01, momentum=0.9), True),
        (legacy.Adagrad(0.01), False),
    ):
        network, compressor = made()
        kind = type(optimizer).__name__
        said = fit(network, optimizer, compressor)
        assert compressor.state_dict()["parameters"]["dense/kernel:0"]["steps"] == 4, kind
        assert len(said) == warned, said
        if warned:
            assert f"dr.prepare(tf.keras.optimizers.{kind}(...), compressor)" in said[0], said


def scenario_a_second_optimizer_with_a_name_of_its_own_is_checked(directory):
    network, compressor = made()
    assert not fit(network, tf.keras.optimizers.SGD(0.01), compressor)
    (said,) = fit(network, tf.keras.optimizers.SGD(0.01, momentum=0.9), compressor, name="second")
    assert "SGD has momentum 0.9 for compressed parameters" in said, said


def scenario_an_optimizer_prepared_for_another_model_is_warned_of(directory):
    """It is prepared for the variables of the compressor that it was prepared with."""
    for others in (False, True):
        network, compressor = made()
        used = made()[1] if others else compressor
        optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.9), used)
        said = fit(network, optimizer, compressor)
        assert len(said) == others, said
        if others:
            assert "SGD has momentum 0.9 for compressed parameters" in said[0], said


def scenario_only_what_was_exchanged_is_counted(directory):
    for dense_below in (0, 10_000):
        network, compressor = made(OwnStep, dense_below=dense_below)
        fit(network, tf.keras.optimizers.SGD(0.01), compressor)
        for row in compressor.stats().values():
            assert (row["path"], row["sent_bytes"]) == ("none", 0), row
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            compressor.summary()
        assert "Nothing has been exchanged yet." in printed.getvalue(), printed.getvalue()
        network.tape_of = lambda tape: hvd.DistributedGradientTape(tape, compression=compressor)
        fit(network, tf.keras.optimizers.SGD(0.01), compressor)
        (row,) = compressor.stats().values()
        assert row["path"] == ("dense" if dense_below else "compressed"), row
        assert row["sent_bytes"] > 0, row


def scenario_a_prepared_optimizer_that_does_not_reduce(directory):
    """It is refused in a step that calls apply_gradients, unless something else reduces."""

    def prepared(**options):
        network, compressor = made(OwnStep, **options)
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        return network, dr.prepare(optimizer, compressor), compressor

    for options in ({}, {"dense_below": 10_000}):
        network, optimizer, compressor = prepared(**options)
        try:
            fit(network, optimizer, compressor)
        except Exception as error:  # AutoGraph wraps our error in its own
            assert "after a reduction over the ranks, got one of this rank only" in str(error)
            assert "self.optimizer.minimize(" in str(error)
        else:
            raise AssertionError("gradients that were not reduced were applied")
    for wrap in (True, False):
        network, optimizer, compressor = prepared()
        network.tape_of = lambda tape, compressor=compressor: hvd.DistributedGradientTape(
            tape, compression=compressor
        )
        if wrap:
            fit(network, optimizer, compressor)
        else:
            network.compile(optimizer, loss="mse")
            network.fit(np.zeros([16, 48]), np.ones([16, 40]), verbose=0)
        assert compressor.stats()["dense/kernel:0"]["path"] == "compressed"


def scenario_keras_3_fit_with_the_optimizer_of_horovod(directory):
    """Horovod's optimizer never reduces under Keras 3, so a prepared one is refused."""
    import keras

    network = keras.Sequential([keras.layers.Input((48,)), keras.layers.Dense(40)])
    compressor = dr.Compressor(parameters=network.trainable_variables)
    optimizer = dr.prepare(keras.optimizers.SGD(0.01, momentum=0.9), compressor)
    network.compile(hvd_keras.DistributedOptimizer(optimizer, compression=compressor), "mse")
    try:
        network.fit(np.zeros([16, 48]), np.zeros([16, 40]), verbose=0)
    except dr.InvalidArgumentError as error:
        assert "under Keras 3, where this optimizer never reduces" in str(error)
    else:
        raise AssertionError("gradients that were not reduced were applied")


def scenario_slices_that_horovod_gathers_are_stepped_with_momentum(directory):
    """Nothing of them is delayed, so a prepared optimizer steps them as it was configured."""

    def trained(prepare, sparse_as_dense):
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(3)
        network = tf.keras.Sequential(
            [tf.keras.layers.Input((2,)), tf.keras.layers.Embedding(200, 16)]
        )
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables)
        optimizer = tf.keras.optimizers.SGD(1.0, momentum=0.5)
        network.compile(
            hvd_keras.DistributedOptimizer(
                dr.prepare(optimizer, compressor) if prepare else optimizer,
                compression=compressor if prepare else hvd.Compression.none,
                sparse_as_dense=sparse_as_dense,
            ),
            loss="mse",
        )
        rows = np.random.default_rng(hvd.rank()).integers(0, 200, [64, 2])
        network.fit(rows, np.ones([64, 2, 16]), batch_size=16, shuffle=False, verbose=0)
        (momentum,) = network.optimizer.momentums
        return network.get_weights()[0], momentum.numpy()

    weights, momentum = trained(True, False)
    expected, expected_momentum = trained(False, False)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_allclose(momentum, expected_momentum, rtol=1e-6)
    assert np.abs(trained(True, True)[0] - expected).max() > 1e-3


def scenario_local_variables_are_stepped_with_momentum(directory):
    """Horovod does not reduce their gradients, so a prepared optimizer changes nothing for them."""

    def trained(prepare, partial):
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(3)
        shared, local = (tf.keras.layers.Dense(40, use_bias=False) for _ in range(2))
        inputs = tf.keras.layers.Input((48,))
        network = tf.keras.Model(inputs, [shared(inputs), local(inputs)])
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables)
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.5)
        optimizer = dr.prepare(optimizer, compressor) if prepare else optimizer
        if not partial:
            optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compressor)
            optimizer.register_local_var(local.kernel)

        @tf.function
        def step(images):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_mean(part**2) for part in network(images)])
            variables = network.trainable_variables
            if not partial:
                optimizer.minimize(loss, variables, tape=tape)
                return
            tape = hvd.PartialDistributedGradientTape(
                tape, compression=compressor, local_layers=[local]
            )
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        images = np.random.default_rng(hvd.rank()).standard_normal([16, 48]).astype(np.float32)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                step(tf.constant(images))
        assert not [one for one in said if "did not reach the compressor" in str(one.message)]
        return shared.kernel.numpy(), local.kernel.numpy()

    for partial in (False, True):
        (shared, local), (other, expected) = (
            trained(prepare, partial) for prepare in (True, False)
        )
        np.testing.assert_allclose(local, expected, rtol=1e-6)
        assert np.abs(shared - other).max() > 1e-4


def scenario_an_update_that_is_traced_with_zeros_stays_prepared(directory):
    """A step of zeros creates the state; the graph that it traces updates without momentum later.

    With gradients that did not pass the compressor, the same graph keeps the momentum.
    """

    def trained(kind, compressed, traced, prepare=True):
        weights = tf.Variable(tf.ones([40, 30]))
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=[("weights", weights)], dense_below=0
        )
        optimizer = kind(0.01)
        if prepare:
            dr.prepare(optimizer, compressor)

        def update(gradient):
            optimizer.apply_gradients([(gradient, weights)])

        graph = tf.function(update, jit_compile=kind is tf.keras.optimizers.Adam)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            # an eager step creates the same state, and the graph is traced later
            (graph if traced else update)(tf.zeros([40, 30]))
        assert (prepare and traced) == any("did not reach" in str(one.message) for one in said)
        random = np.random.default_rng(hvd.rank())
        for _ in range(4):
            wanted = tf.constant(random.standard_normal([40, 30]), tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((weights - wanted) ** 2)
            compression = compressor if compressed else hvd.Compression.none
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            graph(tape.gradient(loss, [weights])[0])
        return weights.numpy()

    def sgd(rate):
        return tf.keras.optimizers.SGD(rate, momentum=0.9)

    for kind in (sgd, tf.keras.optimizers.Adam):
        expected = trained(kind, compressed=True, traced=False)
        np.testing.assert_allclose(trained(kind, compressed=True, traced=True), expected, 1e-6)
        expected = trained(kind, compressed=False, traced=False, prepare=False)
        np.testing.assert_allclose(trained(kind, compressed=False, traced=True), expected, 1e-6)


def scenario_a_prepared_optimizer_without_compression_is_warned_of(directory):
    """Its gradients are complete, so its steps are those of the optimizer as it was configured."""

    def trained(prepare, tape):
        network, compressor = made(OwnStep if tape else tf.keras.Sequential)
        network.tape_of = hvd.DistributedGradientTape
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.5)
        optimizer = dr.prepare(optimizer, compressor) if prepare else optimizer
        said = []
        for _ in range(2):
            if tape:
                said += fit_as_it_is(network, optimizer)
            else:
                said += fit(network, optimizer, hvd.Compression.none)
        return network.get_weights()[0], said

    for tape in (False, True):
        weights, (said,) = trained(True, tape)
        assert "SGD updates variables whose gradients did not reach the compressor" in said, said
        expected, said = trained(False, tape)
        assert not said
        np.testing.assert_allclose(weights, expected, rtol=1e-6)

    network, compressor = made()  # a step of zeros creates the state of an optimizer
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.5), compressor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply_gradients(
            [(tf.zeros_like(one), one) for one in network.trainable_variables]
        )


class _Rates(tf.keras.callbacks.Callback):
    """Notes the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


@mock.patch.object(hvd_keras.callbacks, "K", tf.keras.backend)
def scenario_callbacks_of_horovod(directory):
    """They need the functions of Keras 2, as docs/tutorial-tensorflow.md says."""
    network, compressor = made()
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.04, momentum=0.9), compressor)
    network.compile(hvd_keras.DistributedOptimizer(optimizer, compression=compressor), loss="mse")
    inputs = np.random.default_rng(hvd.rank()).standard_normal([64, 48]).astype(np.float32)
    noted = _Rates()
    history = network.fit(
        inputs,
        inputs[:, :40],
        batch_size=16,
        epochs=3,
        verbose=0,
        callbacks=[
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_keras.callbacks.MetricAverageCallback(),
            hvd_keras.callbacks.LearningRateWarmupCallback(
                0.04, warmup_epochs=2, momentum_correction=False, steps_per_epoch=4
            ),
            noted,
        ],
    )
    losses = hvd.allgather(tf.constant([history.history["loss"]]), name="losses").numpy()
    assert losses.shape == (hvd.size(), 3) and np.ptp(losses, axis=0).max() < 1e-6, losses
    assert losses[0, 2] < losses[0, 0]
    rising = [0.04 * (1 + (step / 8) * (hvd.size() - 1)) / hvd.size() for step in range(1, 9)]
    np.testing.assert_allclose(noted.rates, rising + [0.04] * 4, rtol=1e-5)
    assert compressor.stats()["dense/kernel:0"]["path"] == "compressed"
    assert_equal_everywhere(network.trainable_variables, "after callbacks")
