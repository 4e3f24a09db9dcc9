"""Test that training that ranks do wrong is named, with TensorFlow. Run by tensorflow_scenarios.py."""

import itertools
import os
import re
from unittest import mock

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from scenario_runner import refused, texts_of_warnings
from tensorflow_tools import (
    assert_equal_everywhere,
    batch,
    compressor_of,
    loss_of,
    make_step,
    model,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.tensorflow import starting_values


def _is_last():
    return hvd.rank() == hvd.size() - 1


def scenario_loss_scales_that_differ_are_refused(directory):
    """All ranks raise the error in the step after the one in which the scales differed."""
    for communicator, eager in (
        (dr.Allgather(), False),
        (dr.GTopK(), False),
        (dr.Allgather(), True),
    ):
        scales = [8.0, 8.0, 4.0 if _is_last() else 8.0]
        named = model()
        compressor = compressor_of(
            named, loss_scale=lambda scales=scales: scales[0], communicator=communicator
        )
        step = make_step(named, compressor)
        step = step if eager else tf.function(step, autograph=False)
        for number in range(3):
            step(batch(number))
            scales[:-1] = scales[1:]
        with refused(f"at the same step, got .*; the loss scale here is {scales[0]:g}"):
            step(batch(3))


def scenario_loss_scales_may_differ_in_the_first_step(directory):
    """As in a program that resumes on one rank, and broadcasts the optimizer after that step."""
    for eager in (False, True):
        scales = [4.0 if _is_last() else 8.0, *[8.0] * 4]
        named = model()
        compressor = compressor_of(named, loss_scale=lambda scales=scales: scales[0])
        step = make_step(named, compressor)
        step = step if eager else tf.function(step, autograph=False)
        for number in range(4):
            step(batch(number))
            scales.pop(0)
        assert_equal_everywhere(variables(named), f"{eager}")


def scenario_loss_scales_of_slices_that_differ_are_refused(directory):
    scales = [8.0, 4.0 if _is_last() else 8.0]
    table = tf.Variable(tf.ones([1000, 16]))
    compressor = dr.Compressor(parameters=[("table", table)], loss_scale=lambda: scales[0])

    def step():
        slices = tf.IndexedSlices(tf.ones([2, 16]), tf.constant([1, 5]), tf.constant([1000, 16]))
        return dr.tensorflow.allreduce_gradients([slices], [table], compressor)

    step()
    scales.pop(0)
    step()
    with refused(f"at the same step, got .*; the loss scale here is {scales[0]:g}"):
        step()


@mock.patch.object(starting_values, "_LATER", 6)
def scenario_ranks_that_train_from_other_values_are_named(directory):
    for part, broadcast, eager in (
        ("all", None, False),
        ("all", "before", False),
        ("all", "after", False),
        ("all", "later", False),
        ("one", None, False),
        ("one", "after", False),
        ("none", None, False),
        ("all", None, True),
        ("all", "after", True),
    ):
        # Horovod broadcasts no bfloat16
        dtype = tf.bfloat16 if eager and broadcast is None else tf.float32
        named = model(seed=hvd.rank() if part == "all" else 0, dtype=dtype)
        if part == "one" and _is_last():
            named[2][1].assign_add(tf.ones_like(named[2][1]))
        compressor = compressor_of(named)
        step = make_step(named, compressor)
        step = step if eager else tf.function(step, autograph=False)

        def trained(named=named, step=step, broadcast=broadcast, dtype=dtype):
            for number in range(10):
                if broadcast == "before" and number == 0:
                    hvd.broadcast_variables(variables(named), root_rank=0)
                step(batch(number, dtype=dtype))
                if number == {"after": 0, "later": 4}.get(broadcast):
                    hvd.broadcast_variables(variables(named), root_rank=0)

        texts = [text for text in texts_of_warnings(trained) if "other values" in text]
        differ = part != "none" and broadcast is None
        assert len(texts) == (differ and hvd.rank() == 0), (eager, part, broadcast, texts)
        if not differ:
            assert_equal_everywhere(variables(named), f"{part} {broadcast}")
        if texts:
            others = f"rank {hvd.size() - 1}" if part == "one" or hvd.size() == 2 else "ranks 1, 2"
            name = "kernel1" if part == "one" else "kernel[01]"
            expected = f"deepreduce_hvd: {others} trained from other values of {name} than"
            assert re.match(expected, texts[0]), texts


def scenario_a_rank_at_another_step_when_values_are_compared(directory):
    """All ranks raise an error. None waits for the comparison, which the others do not make."""
    for communicator, eager in (
        (dr.Allgather(), False),
        (dr.GTopK(), False),
        (dr.Allgather(), True),
    ):
        named = model(seed=hvd.rank())
        compressor = compressor_of(named, communicator=communicator)
        step = make_step(named, compressor)
        step = step if eager else tf.function(step, autograph=False)
        step(batch(0))
        if _is_last():
            state = compressor.state_dict()
            for one in state["parameters"].values():
                one["steps"] += 500
            compressor.load_state_dict(state)
        with refused("on every rank, at the same step, got different ones"):
            step(batch(1))


@mock.patch.object(starting_values, "_LATER", 6)
def scenario_models_of_keras_that_train_from_other_values_are_named(directory):
    for callback, steps in ((False, 1), (True, 1), (True, 4)):
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(hvd.rank())
        network = tf.keras.Sequential(
            [tf.keras.layers.Input((48,)), tf.keras.layers.Dense(40), tf.keras.layers.Dense(4)]
        )
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=network.trainable_variables)
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.01), compression=compressor
        )
        network.compile(optimizer, loss="mse", steps_per_execution=steps)
        inputs = np.random.default_rng(hvd.rank()).standard_normal([64, 48]).astype(np.float32)
        callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)] if callback else []

        def fit(network=network, inputs=inputs, callbacks=callbacks):
            outputs = inputs[:, :4]
            network.fit(inputs, outputs, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)

        texts = [text for text in texts_of_warnings(fit) if "other values" in text]
        assert len(texts) == (not callback and hvd.rank() == 0), texts


def _trained_by_a_tape(optimizer, compressor, named, eager, scaled=False, passes=1, state=None):
    """Make three steps of a number of passes with a tape and a Keras optimizer.

    A state is loaded after the first pass, when all variables exist.
    """

    def step(images):
        with tf.GradientTape() as tape:
            loss = loss_of(named, images)
            loss = optimizer.get_scaled_loss(loss) if scaled else loss
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        gradients = tape.gradient(loss, variables(named))
        if scaled:
            gradients = optimizer.get_unscaled_gradients(gradients)
        if passes == 1:
            optimizer.apply_gradients(zip(gradients, variables(named)))
        return gradients

    step = step if eager else tf.function(step, autograph=False)
    for number in range(3 * passes):
        gradients = step(batch(number))
        if passes > 1 and number % passes == passes - 1:
            optimizer.apply_gradients(zip(gradients, variables(named)))
        if number == 0 and state is not None:
            compressor.load_state_dict(state)


def _idle(optimizer, named):
    """Return an optimizer as a loaded model has it: it has made five steps, and makes none here."""
    optimizer.build(variables(named))
    optimizer.iterations.assign(5)
    return optimizer


class _Unhashable(tf.keras.optimizers.SGD):
    def __eq__(self, other):
        return type(other) is type(self)


def _of_another_graph():
    with tf.Graph().as_default():
        return tf.keras.optimizers.SGD(0.01)


def scenario_momentum_beside_a_tape_is_named(directory):
    """The optimizer is not among the callers of compress."""
    optimizers = tf.keras.optimizers
    earlier = model()
    compressor = compressor_of(earlier)
    _trained_by_a_tape(optimizers.SGD(0.01), compressor, earlier, eager=True, passes=4)
    states = [compressor.state_dict(), None]
    for eager, state in itertools.product((False, True), states):
        for make, named_momentum, prepares, passes in (
            (lambda: optimizers.SGD(0.01, momentum=0.9), "SGD has momentum 0.9", False, 1),
            (lambda: optimizers.SGD(0.01, momentum=0.9), "SGD has momentum 0.9", False, 4),
            (lambda: optimizers.Adam(0.01), "Adam has beta_1 0.9", False, 1),
            (lambda: optimizers.legacy.Adam(0.01), "legacy.Adam has beta_1 0.9", False, 1),
            (lambda: optimizers.SGD(0.01), None, False, 1),
            (lambda: optimizers.Adagrad(0.01), None, False, 1),
            (lambda: optimizers.SGD(0.01, momentum=0.9), None, True, 4),
        ):
            named = model()
            compressor, optimizer = compressor_of(named), make()
            if prepares:
                optimizer = dr.prepare(optimizer, compressor)
            others = optimizers.SGD(0.01, momentum=0.9)  # of variables that are not compressed
            others.build([tf.Variable(1.0)])
            idle = _idle(optimizers.RMSprop(0.01, momentum=0.9), named)
            strangers = _Unhashable(0.01), _of_another_graph()
            texts = texts_of_warnings(
                lambda: _trained_by_a_tape(
                    optimizer, compressor, named, eager, passes=passes, state=state
                )
            )
            assert int(idle.iterations) == 5 and len(strangers) == 2
            found = [text for text in texts if "which costs accuracy" in text]
            assert len(found) == (named_momentum is not None), (eager, named_momentum, texts)
            assert all(named_momentum in text and "dr.prepare(" in text for text in found), found


def scenario_a_loss_scale_beside_a_tape_is_needed(directory):
    for eager in (False, True):
        for prepares, passes in ((False, 1), (True, 1), (False, 4)):
            named = model()
            compressor = compressor_of(named)
            inner = tf.keras.optimizers.Adagrad(0.01)
            inner = dr.prepare(inner, compressor) if prepares else inner
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
            with refused("loss_scale: expected the scale of Keras' LossScaleOptimizer"):
                _trained_by_a_tape(optimizer, compressor, named, eager, scaled=True, passes=passes)
        named = model()
        idle = _idle(
            tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01)), named
        )
        fixed = tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.SGD(0.01), dynamic=False, initial_scale=8.0
        )
        _trained_by_a_tape(fixed, compressor_of(named), named, eager, scaled=True)
        assert int(idle.iterations) == 5


def scenario_a_second_compressor_of_the_same_variables_is_named(directory):
    for eager, kind in itertools.product((False, True), ("one", "inside", "closed", "loaded")):
        named, made = model(), []

        def compressor(kind=kind, named=named, made=made):
            if not made or kind == "inside":
                made.append(compressor_of(named))
            return made[-1]

        def step(first, named=named, compressor=compressor):
            del first  # a graph is traced for each of its values
            return make_step(named, compressor())(batch(0))

        step = step if eager else tf.function(step, autograph=False)

        def train(step=step, kind=kind, named=named, made=made):
            step(True)
            if kind in ("closed", "loaded"):
                state = made[-1].state_dict()
                if kind == "closed":
                    made[-1].close()
                made.append(compressor_of(named))
                if kind == "loaded":
                    made[-1].load_state_dict(state)
            step(False)

        texts = [text for text in texts_of_warnings(train) if "begins without residuals" in text]
        assert len(texts) == (kind == "inside" and hvd.rank() == 0), (eager, kind, texts)
        assert all("(kernel0, bias0, kernel1)" in text for text in texts), texts


def scenario_an_optimizer_of_two_compressors_is_refused(directory):
    named = model()
    first, second = compressor_of(named[:2]), compressor_of(named[2:])
    optimizer = dr.prepare(tf.keras.optimizers.SGD(0.01, momentum=0.9), first)
    with refused("one compressor for all parameters of the optimizer, got a second one without k"):
        dr.prepare(optimizer, second)
    dr.prepare(optimizer, compressor_of(named))  # it has all of them
    dr.prepare(optimizer, None)
    dr.prepare(optimizer, second)
    second.close()
    dr.prepare(optimizer, first)
