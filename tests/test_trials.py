"""Which plans ``schedule="auto"`` tries, and in which order."""

import dataclasses
import random

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.planning.trials import expect_one_way, fitted_to_step, plans_to_try, send_alike
from deepreduce_hvd.schedule import Message, Network, Parameter, Profile, Table
from deepreduce_hvd.schedule.plan import Plan, kept_share
from deepreduce_hvd.schedule.rules import predict


def profile_of(draw, latency, seconds_per_byte):
    """A profile of random layers with a measured network."""
    count, ready, parts = draw.randint(1, 12), 0.0, []
    for number in range(count):
        ready += draw.uniform(1e-4, 1e-2)
        elements = draw.randint(1_000, 3_000_000)
        seconds = elements * 1e-9
        parts.append(Parameter(f"p{number}", elements, ready, seconds, seconds / 5))
    sizes = (1e3, 1e5, 1e7)
    table = Table(tuple((size, latency + seconds_per_byte * size) for size in sizes))
    return Profile(tuple(parts), 0.01, 0.0, 2, 1, "codec", 0.01, table, table)


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_valid_and_differ(seed):
    draw = random.Random(seed)
    latency, per_byte = 10 ** draw.uniform(-5, -3), 10 ** draw.uniform(-10, -6)
    profile = profile_of(draw, latency, per_byte)
    names = [part.name for part in profile.parameters]
    plans = [(rule, Plan.from_json(text)) for rule, text in plans_to_try(profile, ("Allgather",))]
    assert plans[0][0] == "plan" and len({plan.messages for _, plan in plans}) == len(plans)
    for _, plan in plans:
        assert [name for message in plan.messages for name in message.members] == names
    best = min(plan.step_seconds for _, plan in plans)
    assert plans[0][1].step_seconds <= best * (1 + 1e-6)
    for rule in ("dense", "fp16"):
        found = [plan for other, plan in plans if other == rule]
        assert all(message.way == rule for plan in found for message in plan.messages)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_memory_no_plan_sends_float16(seed):
    """Nothing would keep what float16 cannot carry."""
    draw = random.Random(seed)
    profile = profile_of(draw, 10 ** draw.uniform(-5, -3), 10 ** draw.uniform(-10, -6))
    small = Policy("dense")  # Horovod sends it, and it has no memory
    names = [part.name for part in profile.parameters]
    for buckets in (None, [names]):
        for memory in (dr.NoMemory(), dr.Residual()):
            policies = {"small": small, "one": Policy("codec", dr.Codec(dr.TopK(0.01)), memory)}
            ways = layout.ways_of(policies)
            plans = plans_to_try(profile, ("Allgather",), buckets, ways)
            found = {message.way for _, text in plans for message in Plan.from_json(text).messages}
            rules = [rule for rule, _ in plans]
            assert rules[0] == "plan" and {"dense", "codec"} <= found, rules
            assert ("fp16" in found) == (memory == dr.Residual())


@pytest.mark.parametrize("seed", range(20))
def test_plans_for_given_buckets(seed):
    """Buckets may have uncompressed parameters too, and none of the profile's."""
    draw = random.Random(seed)
    profile = profile_of(draw, 10 ** draw.uniform(-5, -3), 10 ** draw.uniform(-10, -6))
    names = [part.name for part in profile.parameters]
    draw.shuffle(names)  # the gradients of a bucket come together, in another order
    buckets, left = [["small"]], list(names)
    while left:
        length = draw.randint(1, len(left))
        buckets.append([*left[:length], "bias"])
        left = left[length:]
    plans = plans_to_try(profile, ("Allgather",), buckets)
    found = {rule: Plan.from_json(text) for rule, text in plans}
    assert "plan" in found and len({plan.messages for plan in found.values()}) == len(plans)
    assert {"dense", "fp16"} <= found.keys() | {
        plan.messages[0].way for plan in found.values() if len({m.way for m in plan.messages}) == 1
    }
    for plan in found.values():
        members = [[*message.members, "bias"] for message in plan.messages]
        assert members == buckets[1:]
        assert plan.step_seconds >= found["plan"].step_seconds * (1 - 1e-6)


def test_each_grouping_of_payloads_is_tried_once():
    """On a fast network, almost the same step is predicted for all of them."""
    table = Table(((1e3, 1e-5), (1e7, 1e-3)))
    parts = tuple(Parameter(f"p{n}", 100_000, 0.01 * (n + 1), 1e-4, 1e-5) for n in range(5))
    profile = Profile(parts, 0.01, 0.0, 2, 1, "codec", 0.01, table, table)
    plans = [(rule, Plan.from_json(text)) for rule, text in plans_to_try(profile, ("Allgather",))]
    rules = dict(plans)
    assert len(rules["buckets"].messages) == 1 < len(rules["codec"].messages)
    assert rules["buckets"].step_seconds == pytest.approx(rules["codec"].step_seconds, rel=1e-3)
    # with one parameter, there is only one grouping
    alone = dataclasses.replace(profile, parameters=parts[:1])
    rules = [rule for rule, _ in plans_to_try(alone, ("Allgather",))]
    assert "buckets" not in rules


@pytest.mark.parametrize("given", [False, True])
def test_a_profile_is_fitted_to_a_measured_step(given):
    """The fitted profile predicts the measured step, unless that is too short for the model."""
    for seed in range(20):
        draw = random.Random(seed)
        profile = profile_of(draw, 1e-4, 1e-9)
        parts = [
            dataclasses.replace(part, encode_seconds=0.5 * draw.uniform(0.01, 0.02))
            for part in profile.parameters
        ]
        profile = dataclasses.replace(profile, parameters=tuple(parts))
        buckets = [[part.name] for part in parts] if given else None
        groups = [1] * len(parts) if given else None
        network = Network(profile.hosts, profile.link())

        def step(profile=profile, network=network, groups=groups, **numbers):
            one = dataclasses.replace(profile, **numbers)
            return predict("buckets", one, network, groups=groups)[0].step_seconds

        shortest, longest = step(encoding_delay=0.0), step(encoding_delay=1.0)
        rest = draw.uniform(0.001, 0.1)
        for seconds in (step(encoding_delay=draw.uniform(0.1, 0.9)), longest + rest):
            found = fitted_to_step(profile, seconds, buckets)
            assert step(**found) == pytest.approx(seconds, rel=1e-4)
            assert found["update_seconds"] == pytest.approx(max(seconds - longest, 0.0), abs=1e-9)
        found = fitted_to_step(profile, 0.99 * shortest, buckets)
        assert found["encoding_delay"] < 1e-9 and found["update_seconds"] == 0


def test_the_share_that_is_sent():
    messages = (Message(("a",), "codec", 0.1, "Allgather"), Message(("b", "c"), "fp16"))
    elements = {"a": 100, "b": 50, "c": 50, "other": 7}
    assert kept_share(messages, elements) == pytest.approx(110 / 200)


@pytest.mark.parametrize(
    "groups, words",
    [
        (
            [("codec", 4), ("dense", 3), ("codec", 2), ("fp16", 1), ("dense", 1)],
            "6 parameters compressed in 2 messages at a density of 0.1, 4 uncompressed, 1 as float16",
        ),
        ([("codec", 1)], "1 parameter compressed in 1 message at a density of 0.1"),
        ([], "no messages"),
        ([("fp16", 1), ("dense", 2)], "2 parameters uncompressed, 1 as float16"),
        ([("fp16", 1)], "1 parameter as float16"),
    ],
)
def test_plans_in_words(groups, words):
    messages = []
    for way, count in groups:
        members = tuple(f"p{len(messages)}.{number}" for number in range(count))
        how = (0.1, "Allgather") if way == "codec" else ()
        messages.append(Message(members, way, *how))
    assert _plan(*messages).in_words() == words


def _plan(*messages):
    return Plan(messages, (), 0.0, "none", "none", 2, 1, "none")


def test_plans_that_send_alike_may_have_other_densities_and_messages():
    one = _plan(Message(("a", "b"), "codec", 0.1, "Allgather"), Message(("c",), "dense"))
    other = _plan(
        Message(("a",), "codec", 0.11, "Allgather"),
        Message(("b",), "codec", 0.1, "Allgather"),
        Message(("c",), "dense"),
    )
    third = _plan(Message(("a", "b"), "codec", 0.1, "Allgather"), Message(("c",), "fp16"))
    assert send_alike(one, other) and not send_alike(one, third)


def test_a_profile_needs_a_plan_that_sends_everything_alike():
    expect_one_way(
        _plan(
            Message(("a",), "codec", 0.1, "Allgather"), Message(("b",), "codec", 0.1, "Allgather")
        )
    )
    encoded = Message(("a",), "codec", 0.1, "Allgather")
    for other in (
        Message(("b",), "dense"),
        Message(("b",), "codec", 0.2, "Allgather"),
        Message(("b",), "codec", 0.1, "SplitAllgather"),
    ):
        with pytest.raises(dr.InvalidArgumentError, match="profile: expected a job that"):
            expect_one_way(_plan(encoded, other))
    for alone in (Message(("b",), "dense"), Message(("b",), "codec", 0.1, "SplitAllgather")):
        with pytest.raises(dr.InvalidArgumentError, match="profile: expected a job that"):
            expect_one_way(_plan(alone))
