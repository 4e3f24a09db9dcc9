"""Test plans that change while a job trains, with TensorFlow. Run by tensorflow_schedule.py."""

import random
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import random_plans
import tensorflow as tf
from scenario_runner import refused
from tensorflow_overflow_tools import coefficients, compressor_of, made, make_step, residuals
from tensorflow_schedule_tools import CODEC, OwnValues, auto, expect_mass_balance, follow, plan_of
from tensorflow_tools import assert_equal_everywhere, sum_over_ranks

import deepreduce_hvd as dr
import deepreduce_hvd.tensorflow


def scenario_plans_that_change_in_every_step_lose_nothing(directory):
    """With another random plan in each step, what is sent plus what is kept equals the input."""
    _change_plans({})


def scenario_plans_that_change_with_other_settings(directory):
    _change_plans({"loss_scale": lambda: 1.0}, {"memory": dr.NoMemory()})


def _change_plans(*settings):
    for number, options in enumerate(settings):
        draw = random.Random(number)
        network = made()
        compressor = auto(network, **options)
        function = make_step(network, compressor)
        step = dr.tensorflow.scheduled(compressor)(function)
        names = [name for name, policy in compressor.policies.items() if not policy.dense]
        came, arrived, halved = dict.fromkeys(network, 0.0), dict.fromkeys(network, 0.0), set()
        first = [{}, {"quiet": "dense"}, {"quiet": "fp16", "loud": "dense"}, {}, {"loud": "fp16"}]
        for place in range(11):
            plan = (
                plan_of(**first[place])
                if place < len(first)
                else random_plans.random_plan(draw, names, hvd.size(), repr(CODEC))
            )
            follow(compressor, plan)
            gradients = coefficients(place, network)
            before = residuals(compressor)
            sums = step(gradients)
            assert_equal_everywhere(sums.values(), f"plans {number} {place}")
            paths = {name: row["path"] for name, row in compressor.stats().items()}
            ways = {name: message.way for message in plan.messages for name in message.members}
            for name, gradient in gradients.items():
                came[name] = came[name] + gradient.numpy().astype(np.float64)
                arrived[name] = arrived[name] + sums[name].numpy().astype(np.float64)
                way = ways.get(name, "codec" if name in names else "dense")
                assert paths[name] == {"codec": "compressed"}.get(way, way), (name, paths, plan)
                if way == "codec":
                    continue
                if way == "fp16":
                    halved.add(name)
                # an oracle for what is sent uncompressed: gradients and residuals, exactly
                own = gradient.numpy().astype(np.float64)
                if name in before:
                    left = residuals(compressor)[name]
                    assert way == "fp16" or not left.any(), (name, way)
                    own = own + (before[name] - left).reshape(gradient.shape)
                expected = sum_over_ranks(own)
                limit = 1e-3 if way == "fp16" else 1e-6  # sums of float16 round
                difference = np.abs(sums[name].numpy() - expected).max()
                assert difference <= limit * np.abs(expected).max(), (name, way, difference)
        if options.get("memory") is None:
            expect_mass_balance(compressor, network, came, arrived, halved)
        assert function.experimental_get_tracing_count() == 1


def scenario_uncompressed_plans_equal_fixed_plans(directory):
    """A job that changes to a plan at its first step sends what one that starts with it sends.

    Averages of float16 differ by what a residual keeps, which a given plan does not have.
    """
    for ways in ({"quiet": "dense", "loud": "fp16"}, {"loud": "dense"}):
        plan = plan_of(**ways)
        one, other = made(), made()
        planned = compressor_of(other, CODEC, schedule=plan)
        changed = auto(one)
        follow(changed, plan)
        steps = [
            dr.tensorflow.scheduled(compressor)(make_step(network, compressor, op=hvd.Average))
            for network, compressor in ((one, changed), (other, planned))
        ]
        for number in range(3):
            found, expected = (step(coefficients(number, one)) for step in steps)
            for name in one:
                # with "auto", a residual keeps what float16 rounds
                limit = 4e-3 if ways.get(name) == "fp16" else 1e-6
                np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=limit)
        assert changed.plan == planned.plan == plan


def scenario_a_codec_fails_on_one_rank(directory):
    """All ranks get the error of a rank that cannot encode, in the first steps and after a plan."""
    network = made()
    compressor = auto(network, dr.Codec(dr.TopK(0.05), value=OwnValues()))
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
    step(coefficients(0, network))
    for plan in (None, plan_of(quiet="dense")):
        follow(compressor, plan)
        with (
            mock.patch.object(OwnValues, "fails", hvd.rank() == 1),
            refused(r"parameter (quiet|loud): rank 1: InvalidArgumentError: values: expected good"),
        ):
            step(coefficients(1, network))
        hvd.allreduce(tf.zeros([1]), name="failed")


def scenario_states_and_checkpoints_while_plans_change(directory):
    """A state or a checkpoint, loaded while variables are sent uncompressed, is sent once."""
    network = made()
    compressor = auto(network)
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
    for number in range(3):
        step(coefficients(number, network))
    state, kept = compressor.state_dict(), residuals(compressor)
    prefix = str(directory / f"auto.{hvd.size()}.{hvd.rank()}")
    tf.train.Checkpoint(compressor=compressor.trackable).write(prefix)
    follow(compressor, plan_of(quiet="dense", loud="fp16"))
    zeros = {name: tf.zeros_like(variable) for name, variable in network.items()}
    first = step(zeros)
    for load in (
        lambda: compressor.load_state_dict(state),
        lambda: tf.train.Checkpoint(compressor=compressor.trackable).read(prefix).assert_consumed(),
    ):
        for name, gradient in step(zeros).items():
            rest = 1e-2 if name == "loud" else 0.0  # what float16 has rounded
            assert np.abs(gradient.numpy()).max() <= rest, name
        load()
        assert compressor.stats()["quiet"]["steps"] == 3
        for name, gradient in step(zeros).items():
            np.testing.assert_array_equal(gradient, first[name], err_msg=name)
            if name in kept:
                expected = sum_over_ranks(kept[name].reshape(gradient.shape))
                np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-2, err_msg=name)
    assert compressor.stats()["quiet"]["steps"] == 4


def scenario_void_steps_lose_nothing_after_variables_went_dense(directory):
    """The residual of a variable that becomes dense is sent once, whichever steps overflow."""
    for voids in ((4,), (5,), (6, 7), (4, 5, 8)):
        network, scale = made(), tf.Variable(1024.0)
        compressor = auto(network, loss_scale=lambda: scale)
        step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
        came, arrived = dict.fromkeys(network, 0.0), dict.fromkeys(network, 0.0)
        for number in range(10):
            if number == 4:
                follow(compressor, plan_of(quiet="dense", loud="dense"))
            scale.assign(2048.0 if number > 6 else 1024.0)
            peaks = {"quiet": np.inf} if number in voids and hvd.rank() == 0 else None
            gradients = coefficients(number, network, peaks)
            factor = float(scale.numpy())
            sums = step({name: gradient * factor for name, gradient in gradients.items()})
            if number in voids:
                assert not np.isfinite(sums["quiet"].numpy()).all()
                continue
            for name, gradient in gradients.items():
                came[name] = came[name] + gradient.numpy().astype(np.float64)
                arrived[name] = arrived[name] + sums[name].numpy().astype(np.float64) / factor
        compressor.adapter.close_steps()
        assert not any(kept.any() for kept in residuals(compressor).values()), voids
        expect_mass_balance(compressor, network, came, arrived, (), factor)


def scenario_sums_beyond_float16_wait(directory):
    """As float16, what exceeds the range in the sum stays in the residual."""
    network = made()
    compressor = auto(network)
    step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
    follow(compressor, plan_of(quiet="fp16", loud="fp16"))
    came, arrived = dict.fromkeys(network, 0.0), dict.fromkeys(network, 0.0)
    for number in range(9):
        gradients = coefficients(number, network, {"quiet": 60_000.0 if number < 3 else 0.0})
        if number == 1:  # leaves what exceeds the range
            came["quiet"] = came["quiet"] - residuals(compressor)["quiet"].reshape(40, 30)
            compressor.load_state_dict(_with_residual(compressor.state_dict(), 50_000.0))
            came["quiet"] = came["quiet"] + 50_000.0
        sums = step(gradients)
        for name, gradient in gradients.items():
            assert np.isfinite(sums[name].numpy()).all(), (name, number)
            came[name] = came[name] + gradient.numpy().astype(np.float64)
            arrived[name] = arrived[name] + sums[name].numpy().astype(np.float64)
    expect_mass_balance(compressor, network, came, arrived, set(network))


def _with_residual(state, number):
    for kept in state["parameters"]["quiet"]["memory"].values():
        kept[...] = number
    return state


def scenario_float16_messages_lose_nothing_at_any_magnitude(directory):
    """Residuals keep what float16 cannot carry: small parts, and parts beyond its range."""
    network = made()
    for exponent in (-10, -8, -6, -3, 0, 3, 5):
        compressor = auto(network)
        step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor, op=hvd.Average))
        follow(compressor, plan_of(quiet="fp16", loud="fp16"))
        draw, own = np.random.default_rng(100 + exponent), np.random.default_rng(hvd.rank())
        direction = draw.standard_normal((2, 40, 30)) * 10.0**exponent
        came, arrived = np.zeros((2, 2, 40, 30))
        for _ in range(20):
            gradients = (direction * own.uniform(0, 2, (2, 40, 30))).astype(np.float32)
            came += gradients
            sums = step({"quiet": gradients[0], "loud": gradients[1], "small": tf.zeros(8)})
            average = np.stack([sums[name].numpy() for name in ("quiet", "loud")])
            assert np.isfinite(average).all(), exponent
            arrived += average
        kept = residuals(compressor)
        left = np.stack([kept[name].reshape(40, 30) for name in ("quiet", "loud")])
        both = sum_over_ranks(np.stack([came - left, came])) / hvd.size()
        lost = np.linalg.norm(both[0] - arrived) / np.linalg.norm(both[1])
        uneven = hvd.size() & (hvd.size() - 1) and exponent < -3
        assert lost < (0.03 if uneven else 1e-3), (lost, exponent)


def scenario_nan_leaves_the_residual_as_it_is(directory):
    """Whichever way the gradient is sent."""
    network = made()
    for way in ("codec", "dense", "fp16"):
        compressor = auto(network)
        step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
        for number in range(3):
            step(coefficients(number, network))
        follow(compressor, None if way == "codec" else plan_of(quiet=way, loud=way))
        before = residuals(compressor)
        sums = step(coefficients(4, network, {"quiet": np.nan}))
        assert np.isnan(sums["quiet"].numpy()).any(), way
        after = residuals(compressor)
        np.testing.assert_array_equal(after["quiet"], before["quiet"], err_msg=way)
        assert (after["loud"] != before["loud"]).any(), way
        # the next step takes it along
        sums = step({name: tf.zeros_like(variable) for name, variable in network.items()})
        if way != "codec":
            expected = sum_over_ranks(before["quiet"] - residuals(compressor)["quiet"])
            np.testing.assert_allclose(sums["quiet"].numpy().ravel(), expected, atol=1e-2)


def scenario_own_stages_and_dtypes(directory):
    """Stages that run in NumPy, and gradients of all dtypes, follow plans too."""
    own = dr.Codec(dr.TopK(0.05), value=OwnValues())
    cases = [(tf.float32, own), *((one, CODEC) for one in (tf.float16, tf.bfloat16, tf.float64))]
    for dtype, codec in cases:
        network = made(dtype)
        compressor = auto(network, codec)
        step = dr.tensorflow.scheduled(compressor)(make_step(network, compressor))
        for number, way in enumerate(("codec", "dense", "fp16", "codec")):
            follow(compressor, None if way == "codec" else plan_of(quiet=way, loud=way))
            for name, gradient in step(coefficients(number, network)).items():
                assert gradient.dtype == dtype and gradient.shape == network[name].shape
                assert_equal_everywhere([gradient], f"{dtype.name} {way}")
        row = compressor.stats()["quiet"]
        assert row["dense_bytes"] == 1200 * dtype.size and row["steps"] == 4, row
