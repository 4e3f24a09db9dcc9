"""Test prepare on Keras 2 (tf-keras) and Keras 3 optimizers."""

import copy
import random

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import deepreduce_hvd as dr
from deepreduce_hvd.tensorflow.prepare import is_prepared, momentum_of

SETTINGS = {
    "SGD": ("momentum", "nesterov"),
    "RMSprop": ("momentum", "centered"),
    "Adam": ("beta_1", "amsgrad"),
    "AdamW": ("beta_1", "weight_decay"),
    "Adamax": ("beta_1",),
    "Adagrad": (),
}


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def drawn(draw, names):
    values = {
        "momentum": draw.choice((0.5, 0.9)),
        "nesterov": draw.random() < 0.5,
        "centered": draw.random() < 0.5,
        "beta_1": draw.choice((0.5, 0.9)),
        "amsgrad": draw.random() < 0.5,
        "weight_decay": 0.01,
    }
    return {name: values[name] for name in names}


def variables():
    draw = np.random.default_rng(2)
    return [
        tf.Variable(draw.normal(size=shape).astype(np.float32), name=name)
        for name, shape in (("large", (40, 50)), ("small", (50,)))
    ]


def gradients(step):
    draw = np.random.default_rng(100 + step)
    return [tf.constant(draw.normal(size=shape), tf.float32) for shape in ((40, 50), (50,))]


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
@pytest.mark.parametrize("seed", range(10))
def test_compressed_variables_are_updated_without_momentum(library, seed, capsys):
    draw = random.Random(seed)
    kind = draw.choice(list(SETTINGS))
    settings = drawn(draw, SETTINGS[kind])
    schedule = draw.random() < 0.5
    rate = library.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5) if schedule else 0.01
    own = variables()
    compressor = dr.Compressor(parameters=own)
    make = getattr(library.optimizers, kind)
    optimizer = make(rate, **settings)
    assert dr.prepare(optimizer, compressor) is optimizer
    assert f"prepared {kind}: " in capsys.readouterr().out
    # hvd.DistributedOptimizer does the same: a subclass from the configuration
    wrapped = type(kind, (type(optimizer),), {}).from_config(optimizer.get_config())
    plain_settings, factor = dict(settings), 1.0
    if "momentum" in settings:
        factor = 1 / (1 - settings["momentum"])
        plain_settings["momentum"] = 0.0
    if "beta_1" in settings:
        plain_settings["beta_1"] = 0.0
    scaled = (
        library.optimizers.schedules.ExponentialDecay(0.01 * factor, 2, 0.5)
        if schedule
        else 0.01 * factor
    )
    expected = variables()
    plain = [make(scaled, **{**plain_settings, "nesterov": False} if "nesterov" in settings else plain_settings), make(rate, **settings)]  # fmt: skip
    for step in range(5):
        wrapped.apply_gradients(zip(gradients(step), own))
        for one, gradient, variable in zip(plain, gradients(step), expected):
            one.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(own[0].numpy(), expected[0].numpy(), rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(own[1].numpy(), expected[1].numpy(), rtol=2e-4, atol=1e-5)
    for name, value in settings.items():
        assert getattr(wrapped, name) == value


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_an_update_of_its_own_is_called_with_the_changed_settings(library, kind):
    """A subclass that doubles gradients and counts its calls does so when it is prepared, too."""

    def subclass():
        class Doubles(getattr(library.optimizers, kind)):
            calls = 0

            def update_step(self, gradient, variable, *rate):
                Doubles.calls += 1
                return super().update_step(2 * gradient, variable, *rate)

        return Doubles

    own, expected = variables(), variables()
    compressor = dr.Compressor(parameters=own)
    first, second = subclass(), subclass()
    name, factor = ("momentum", 2.0) if kind == "SGD" else ("beta_1", 1.0)
    optimizer = dr.prepare(first(0.1, **{name: 0.5}), compressor)
    plain = [second(0.1 * factor, **{name: 0.0}), second(0.1, **{name: 0.5})]
    for step in range(3):
        optimizer.apply_gradients(zip(gradients(step), own))
        for one, gradient, variable in zip(plain, gradients(step), expected):
            one.apply_gradients([(gradient, variable)])
    for one, other in zip(own, expected):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=2e-4, atol=1e-5)
    assert first.calls == second.calls == 6


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
def test_a_learning_rate_that_a_callback_sets_counts(library):
    """A changed learning rate takes effect in a tf.function, as in model.fit.

    The optimizer reports the rate that was set.
    """
    own, expected = variables(), variables()
    compressor = dr.Compressor(parameters=own)
    optimizer = dr.prepare(library.optimizers.SGD(0.1, momentum=0.9), compressor)
    plain = library.optimizers.SGD(1.0)
    optimizer.build(own)
    plain.build(expected[:1])

    @tf.function
    def step(large, small):
        optimizer.apply_gradients([(large, own[0]), (small, own[1])])

    for number, rate in enumerate((0.1, 0.1, 0.01)):
        optimizer.learning_rate = rate
        plain.learning_rate = 10 * rate
        large, small = gradients(number)
        step(large, small)
        plain.apply_gradients([(large, expected[0])])
        assert float(optimizer.learning_rate) == pytest.approx(rate)
    np.testing.assert_allclose(own[0].numpy(), expected[0].numpy(), rtol=2e-4, atol=1e-5)


def test_a_momentum_that_is_a_variable_is_replaced_too():
    own, expected = variables(), variables()
    momentum = tf.Variable(0.9, trainable=False)
    optimizer = tf_keras.optimizers.Adam(0.01, beta_1=momentum)
    dr.prepare(optimizer, dr.Compressor(parameters=own))
    plain = tf_keras.optimizers.Adam(0.01, beta_1=0.0)
    optimizer.build(own)

    @tf.function
    def step(large):
        optimizer.apply_gradients([(large, own[0])])

    for number in range(3):
        large, _ = gradients(number)
        step(large)
        plain.apply_gradients([(large, expected[0])])
    np.testing.assert_allclose(own[0].numpy(), expected[0].numpy(), rtol=2e-4, atol=1e-5)
    assert optimizer.beta_1 is momentum


@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
@pytest.mark.parametrize("traced_at", [0.0, 0.9])
def test_a_momentum_that_changes_in_a_graph_changes_the_learning_rate(kind, traced_at):
    own, expected = variables(), variables()
    momentum = tf.Variable(traced_at, trainable=False)
    optimizer = getattr(tf_keras.optimizers, kind)(0.01, momentum=momentum)
    dr.prepare(optimizer, dr.Compressor(parameters=own))
    plain = getattr(tf_keras.optimizers, kind)(0.01, momentum=0.0)
    optimizer.build(own)
    plain.build(expected)

    @tf.function
    def step(large):
        optimizer.apply_gradients([(large, own[0])])

    step(gradients(0)[0])
    plain.learning_rate = 0.01 / (1 - traced_at)
    plain.apply_gradients([(gradients(0)[0], expected[0])])
    for number, now in enumerate((0.5, 0.0, 0.75, 0.9), 1):
        large, _ = gradients(number)
        momentum.assign(now)
        step(large)
        plain.learning_rate = 0.01 / (1 - now)
        plain.apply_gradients([(large, expected[0])])
        np.testing.assert_allclose(own[0].numpy(), expected[0].numpy(), rtol=2e-4, atol=1e-5)
    assert optimizer.momentum is momentum
    momentum.assign(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a momentum below 1"):
        step(large)


@pytest.mark.parametrize(
    ("kind", "settings", "momentum"),
    [
        ("SGD", {"momentum": 0.5}, 0.5),
        ("SGD", {}, 0.0),
        ("RMSprop", {"momentum": 0.25}, 0.25),
        ("Adam", {"beta_1": 0.5}, 0.5),
        ("Adam", {"beta_1": lambda: 0.5}, 0.5),
        ("Adagrad", {}, 0.0),
    ],
)
def test_the_momentum_of_a_legacy_optimizer_is_a_number_while_a_function_is_traced(
    kind, settings, momentum
):
    optimizer = getattr(tf_keras.optimizers.legacy, kind)(0.01, **settings)
    found = []

    @tf.function
    def step():
        found.append(momentum_of(optimizer))

    step()
    assert set(found) == {momentum}  # traced twice, as the first call makes variables
    with tf.Graph().as_default():  # nothing can be read in a tf.compat.v1 graph
        again = getattr(tf_keras.optimizers.legacy, kind)(0.01, **settings)
        assert momentum_of(again) in (momentum, 0.0)


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
@pytest.mark.parametrize("setting", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_a_hint_on_clipping(library, setting, capsys):
    own = variables()
    compressor = dr.Compressor(parameters=own)
    dr.prepare(library.optimizers.SGD(0.1, **{setting: 0.5}), compressor)
    assert f". {setting}=0.5 clips averages" in capsys.readouterr().out
    dr.prepare(library.optimizers.Adagrad(0.1), compressor)
    assert "clips" not in capsys.readouterr().out
    complete = dr.Compressor(dr.Codec(dr.NoneSparsifier()), dr.NoMemory(), parameters=own)
    dr.prepare(library.optimizers.SGD(0.1, **{setting: 0.5}), complete)
    assert "clips" not in capsys.readouterr().out


def test_a_prepared_optimizer_steps_after_its_compressor_is_closed():
    own = variables()
    compressor = dr.Compressor(parameters=own)
    optimizer = dr.prepare(keras.optimizers.SGD(0.1, momentum=0.9), compressor)
    compressor.close()
    before = own[0].numpy()
    optimizer.apply_gradients(zip(gradients(0), own))
    assert not np.array_equal(own[0].numpy(), before)


def test_what_a_job_of_one_process_is_told(capsys):
    own = variables()
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=own)
    dr.prepare(keras.optimizers.SGD(0.1, momentum=0.9), compressor)
    assert "This job of one process compresses nothing" in capsys.readouterr().out
    dr.prepare(keras.optimizers.SGD(0.1), compressor)
    assert "one process" not in capsys.readouterr().out
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable) for variable in own])
    hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, own)
    for row in compressor.stats().values():
        assert (row["path"], row["sent_bytes"]) == ("none", 0)


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
def test_one_process_does_not_use_a_memory_with_momentum(library):
    """Its steps then have the size of the optimizer's own momentum."""
    own, expected = variables(), variables()
    compressor = dr.Compressor(memory=dr.MomentumCorrection(0.9), parameters=own)
    optimizer = dr.prepare(library.optimizers.SGD(0.01, momentum=0.8), compressor)
    plain = library.optimizers.SGD(0.05)
    for step in range(3):
        optimizer.apply_gradients([(gradients(step)[0], own[0])])
        plain.apply_gradients([(gradients(step)[0], expected[0])])
    np.testing.assert_allclose(own[0].numpy(), expected[0].numpy(), rtol=2e-4, atol=1e-5)


def test_a_copy_of_keras_3_is_prepared_again():
    large, _ = variables()
    compressor = dr.Compressor(parameters=[("large", large)])
    optimizer = dr.prepare(keras.optimizers.SGD(0.1, momentum=0.9), compressor)
    copied = copy.deepcopy(optimizer)
    assert is_prepared(optimizer) and not is_prepared(copied)
    assert is_prepared(dr.prepare(copied, compressor))


@pytest.mark.parametrize("library", [tf_keras, keras], ids=["keras2", "keras3"])
def test_none_undoes_it(library):
    own = variables()
    optimizer = library.optimizers.SGD(0.1, momentum=0.9)
    before = type(optimizer), optimizer.get_config()
    dr.prepare(optimizer, dr.Compressor(parameters=own))
    assert optimizer.get_config() == before[1]
    assert dr.prepare(optimizer, None) is optimizer
    assert (type(optimizer), optimizer.get_config()) == before


def test_what_cannot_be_prepared_is_refused():
    own = variables()
    compressor = dr.Compressor(parameters=own)
    with pytest.raises(dr.InvalidArgumentError, match=r"expected one of SGD, .* got .*Ftrl"):
        dr.prepare(keras.optimizers.Ftrl(), compressor)
    for library in (keras, tf_keras):
        with pytest.raises(
            dr.InvalidArgumentError, match="another optimizer than Nadam, .*; use Adam"
        ):
            dr.prepare(library.optimizers.Nadam(), compressor)
    with pytest.raises(
        dr.InvalidArgumentError, match=r"in place of tf\.keras\.optimizers\.legacy\."
    ):
        dr.prepare(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9), compressor)
    wrapped = hvd_keras.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), compression=compressor)
    with pytest.raises(dr.InvalidArgumentError, match=r"before hvd\.DistributedOptimizer wraps"):
        dr.prepare(wrapped, compressor)
