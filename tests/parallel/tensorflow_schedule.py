"""Test ``schedule="auto"`` on stock Horovod with TensorFlow.

Started by test_tensorflow_schedule.py under horovodrun.
"""

import json
import os
import sys
from unittest import mock

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's Keras optimizers need Keras 2

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras as keras_3
import numpy as np
import tensorflow as tf
import tensorflow_changing_plans
import tensorflow_planned_tables
from scenario_runner import refused, texts_of_warnings
from tensorflow_overflow_tools import coefficients, made, make_step
from tensorflow_schedule_tools import CODEC, agreed, auto, equal_times
from tensorflow_tools import (
    assert_equal_everywhere,
    batch,
    compressor_of,
    make_step as make_tape_step,
    model,
    run_all,
    variables,
)

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow
from deepreduce_hvd.planning import scheduler as scheduler_module
from deepreduce_hvd.tensorflow import starting_values

#: the first step in which everything has been measured and all plans had their turns
DECIDED = 170
BATCH, INPUTS, OUTPUTS = 16, 30, 4


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_measures_and_decides_alike(directory):
    """All ranks change plans at the same steps, and no function is traced again.

    The profile, the timeline and the state are then available.
    """
    network = made()
    codec = dr.Codec(dr.TopK(0.05, warmup_steps=3), index=dr.Rice(), value=dr.LloydMax(bits=1))
    compressor = auto(network, codec)
    function = make_step(network, compressor, op=hvd.Average)
    step = dr.tensorflow.scheduled(compressor)(function)
    densities = []
    with equal_times(compressor) as (plans, calls):
        for number in range(DECIDED):
            gradients = step(coefficients(number, network))
            densities.append(compressor.stats()["loud"]["sent_values"] if number < 5 else 0)
            if number % 20 == 0:
                assert_equal_everywhere(gradients.values(), f"auto {number}")
    agreed((plans, calls))
    expected = [codec.sparsifier.most_selected(1200, number) for number in range(5)]
    assert densities[:5] == expected, (densities[:5], expected)
    assert plans[0] == "" and plans[-1] != "" and len(set(plans)) > 2, list(map(len, plans))
    assert function.experimental_get_tracing_count() == 1
    paths = {
        name: row["path"].replace("compressed", "codec") for name, row in compressor.stats().items()
    }
    for message in compressor.plan.messages:
        assert {paths[name] for name in message.members} == {message.way}, (message, paths)
    trials = compressor.adapter.auto.scheduler.trials
    assert {trial.measured for trial in trials} == {1.0}, trials
    assert "fp16" not in {trial.rule for trial in trials}, trials  # Gloo would sum it
    assert len(trials) > 1 and {trial.kept for trial in trials} >= {1.0, 0.05}, trials
    most = max(trials, key=lambda trial: trial.kept)
    assert compressor.plan.step_seconds == most.predicted, (compressor.plan, trials)
    for message in compressor.plan.messages:
        assert message.way != "codec" or message.communicator == "Allgather", message
    profile = compressor.profile()
    assert profile.hosts == hvd.size() and profile.link() is not None, profile
    assert {part.name for part in profile.parameters} == {"quiet", "loud"}, profile
    for part in profile.parameters:
        assert part.payload_bytes and part.encode_seconds > 0 and part.decode_seconds > 0, part
        assert 0 <= part.ready_seconds < 1, part
    path = directory / f"timeline.{hvd.size()}.{hvd.rank()}.json"
    compressor.timeline(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"measured", "predicted"}, names
    assert all(event.get("dur", 0) >= 0 for event in events), events
    notes = compressor.adapter.notes()
    assert len(notes) == 2 and "Measured steps: " in notes[1], notes


def scenario_a_compressor_that_is_not_told_of_steps(directory):
    """Without the decorator or the callback, there is an error that says what to write."""
    network = made()
    compressor = auto(network)
    with refused(
        r"expected to be told .*@deepreduce_hvd\.tensorflow\.scheduled.*schedule_callback"
    ):
        make_step(network, compressor)(coefficients(0, network))
    step = make_step(network, compressor)
    dr.tensorflow.schedule_callback(compressor)  # not given to fit
    with refused("expected to be told .* got a gradient before the first step"):
        make_step(network, compressor)(coefficients(0, network))
    inside = tf.function(
        lambda: dr.tensorflow.scheduled(compressor)(step)(coefficients(0, network))
    )
    with refused(r"scheduled: expected a call outside of functions of TensorFlow"):
        inside()
    hvd.allreduce(tf.zeros([1]), name="told")
    compressor.close()
    with refused(r"Compressor: expected one that is not closed"):
        dr.tensorflow.scheduled(compressor)


def scenario_what_auto_refuses(directory):
    network = made()
    compressor = auto(network)
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor, groups=1))
    with refused(r"expected a message of its own with schedule='auto', got groups="):
        step(coefficients(0, network))
    table = tf.Variable(tf.ones([1000, 16]))
    slices = tf.IndexedSlices(tf.ones([1, 16]), tf.constant([3]), tf.constant([1000, 16]))
    sliced = auto({"table": table})
    with refused(r"parameter table: expected a dense gradient with schedule='auto'"):
        dr.tensorflow.allreduce_gradients([slices], [table], compression=sliced)


def scenario_a_failure_of_rank_0_reaches_every_rank(directory):
    """If rank 0 cannot make plans, all ranks get an error, and none waits."""
    network = made()
    compressor = auto(network)
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))

    def failing(*arguments):
        raise ValueError("no plan today")

    with mock.patch.object(scheduler_module, "plans_to_try", failing), refused(r"no plan today"):
        for number in range(30):
            step(coefficients(number, network))


@mock.patch.object(scheduler_module, "_REST", 10**9)
def scenario_auto_starts_again(directory):
    """All ranks measure again when steps change, and after the ranks have changed."""
    network = made()
    compressor = auto(network)
    function = make_step(network, compressor)
    step = dr.tensorflow.scheduled(compressor)(function)
    with equal_times(compressor, lambda step: 1.0 if step <= DECIDED else 10.0) as (_, calls):
        for number in range(DECIDED + 200):
            step(coefficients(number, network))
    rounds = np.flatnonzero(np.diff(calls) > 20)
    assert len(rounds) == 2 and rounds[0] < DECIDED < rounds[1] < DECIDED + 40, rounds
    agreed(calls)
    compressor.adapter.forget_steps()  # as elastic training does
    assert compressor.plan is None
    with equal_times(compressor) as (plans, calls):
        for number in range(30):
            gradients = step(coefficients(number, network))
    assert plans[0] == "" and plans[-1] != "", plans
    agreed((plans, calls))
    assert_equal_everywhere(gradients.values(), "again")
    assert function.experimental_get_tracing_count() == 1


def scenario_several_optimizers(directory):
    """Steps of several optimizers may be decorated together or separately."""
    network = made(shapes={"one": (40, 30), "two": (30, 40)})
    compressor = auto(network)
    steps = [
        dr.tensorflow.scheduled(compressor)(make_step(network, compressor, [name]))
        for name in network
    ]
    for number in range(40):
        for name, step in zip(network, steps):
            gradients = step(coefficients(number, {name: network[name]}))
            assert_equal_everywhere(gradients.values(), f"{name} {number}")
    planned = {name for message in compressor.plan.messages for name in message.members}
    assert planned == {"one", "two"}, compressor.plan


def scenario_nothing_to_measure(directory):
    """Without compressed gradients there is no plan."""
    network = made()
    compressor = auto(network, dense_below=1 << 20)
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
    for number in range(15):
        step(coefficients(number, network))
    assert compressor.plan is None
    assert compressor.adapter.notes() == ["Schedule: no plan, because no gradient is compressed."]


def scenario_accumulated_gradients(directory):
    """Calls without a reduction are no steps of the schedule."""
    network = made()
    compressor = auto(network)
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1), compression=compressor, backward_passes_per_step=3
    )

    @dr.tensorflow.scheduled(compressor)
    @tf.function
    def step(wanted):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(network[name] * wanted[name]) for name in network])
        optimizer.minimize(loss, list(network.values()), tape=tape)

    with equal_times(compressor) as (plans, _):
        for number in range(90):
            step(coefficients(number, network))
    assert len(plans) == 30 == compressor.stats()["quiet"]["steps"] and plans[-1] != "", plans
    assert_equal_everywhere(network.values(), "accumulated")


# --- model.fit ---


def _data():
    random_numbers = np.random.default_rng(hvd.rank())
    inputs = random_numbers.standard_normal((40 * BATCH, INPUTS)).astype(np.float32)
    return inputs, inputs[:, :OUTPUTS]


def scenario_fit(directory):
    """model.fit with Horovod's optimizer ends with a plan; all ranks have equal weights."""
    for epochs, options in ((5, {}), (5, {"steps_per_execution": 4}), (1, {"run_eagerly": True})):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((INPUTS,)), tf.keras.layers.Dense(40, "relu"),
             tf.keras.layers.Dense(OUTPUTS)]
        )  # fmt: skip
        compressor = dr.Compressor(
            CODEC, parameters=model.trainable_variables, dense_below=50, schedule="auto"
        )
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.05), compression=compressor
        )
        model.compile(optimizer, "mse", **options)
        callback = dr.tensorflow.schedule_callback(compressor)
        with equal_times(compressor) as (plans, calls):
            losses = model.fit(
                *_data(), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[callback]
            ).history["loss"]
        agreed((plans, calls))
        steps = 40 * epochs // options.get("steps_per_execution", 1)
        assert len(plans) == steps and plans[-1] != "", (options, len(plans), plans)
        if not options.get("run_eagerly"):
            # Keras makes the optimizer's variables in the first trace, so there is a second one
            assert model.train_tf_function.experimental_get_tracing_count() <= 2
        assert losses[-1] <= losses[0], losses
        assert_equal_everywhere(model.trainable_variables, f"fit {options}")


def scenario_fit_of_keras_3(directory):
    """A model of Keras 3 whose step reduces with Horovod's tape works in fit too."""

    class Model(keras_3.Sequential):
        def train_step(self, data):
            inputs, truth = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs, training=True) - truth) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            sources = [variable.value for variable in self.trainable_variables]
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, sources), self.trainable_variables)
            )
            return {"loss": loss}

    keras_3.utils.set_random_seed(0)
    layers = [
        keras_3.layers.Input((INPUTS,)),
        keras_3.layers.Dense(40),
        keras_3.layers.Dense(OUTPUTS),
    ]
    model = Model(layers)
    compressor = dr.Compressor(
        CODEC, parameters=model.trainable_variables, dense_below=50, schedule="auto"
    )
    model.compile(keras_3.optimizers.SGD(0.05), jit_compile=False)
    callback = dr.tensorflow.schedule_callback(compressor)
    with equal_times(compressor) as (plans, calls):
        model.fit(*_data(), batch_size=BATCH, epochs=3, verbose=0, callbacks=[callback])
    agreed((plans, calls))
    assert len(plans) == 120 and plans[-1] != "", (len(plans), plans)
    assert_equal_everywhere([one.value for one in model.trainable_variables], "Keras 3")


@mock.patch.object(starting_values, "_LATER", 6)
def scenario_a_plan_compares_the_values_that_ranks_train_from(directory):
    for broadcast in (True, False):
        named = model(seed=hvd.rank())
        compressor = compressor_of(named, schedule="auto")
        step = dr.tensorflow.scheduled(compressor)(
            tf.function(make_tape_step(named, compressor), autograph=False)
        )

        def trained(named=named, step=step, broadcast=broadcast):
            for number in range(10):
                step(batch(number))
                if broadcast and number == 0:
                    hvd.broadcast_variables(variables(named), root_rank=0)

        texts = [text for text in texts_of_warnings(trained) if "other values" in text]
        assert len(texts) == (hvd.rank() == 0 and not broadcast), texts


if __name__ == "__main__":
    hvd.init()
    parts = tensorflow_changing_plans, tensorflow_planned_tables
    run_all({**globals(), **{k: v for part in parts for k, v in vars(part).items()}}, sys.argv[1])
