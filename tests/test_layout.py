"""Test layouts of plans, and the times of steps."""

import random
import re
from pathlib import Path

import pytest
import random_plans

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import Policy, rows_codec
from deepreduce_hvd.planning.step_times import _MOST_EVENTS, StepTimes
from deepreduce_hvd.schedule import Message, Plan
from deepreduce_hvd.schedule.plan import COMMUNICATORS
from deepreduce_hvd.stages.base import Memory


def plan_of(*messages):
    return Plan(messages, (), 0.0, "none", "none", 2, 1, "none")


@pytest.mark.parametrize(
    "messages",
    [
        [Message(("one", "one"), "codec", 0.1, "Allgather")],
        [Message(("one",), "codec", 0.1, "Allgather"), Message(("two", "one"), "dense")],
    ],
)
def test_a_plan_with_a_parameter_in_two_messages_is_refused(messages):
    codec = Policy("codec", dr.Codec(dr.TopK(0.1)), dr.Residual())
    with pytest.raises(dr.InvalidArgumentError, match="one message, got one more than once"):
        layout.of_plan({"one": codec, "two": codec}, 0, plan_of(*messages))


@pytest.mark.parametrize("seed", range(20))
def test_layouts_of_plans_leave_tables_out(seed):
    """Those that the user names, and those that are found; nothing else changes."""
    draw = random.Random(seed)
    names = [f"p{number}" for number in range(6)]
    codec, rows = dr.Codec(dr.TopK(0.01)), Policy("codec", rows_codec(), dr.NoMemory())
    other = Policy("codec", codec, dr.Residual())
    plan = random_plans.random_plan(draw, names, 2)
    named, found = (set(draw.sample(names, draw.randint(0, 3))) for _ in range(2))
    found -= named
    tables = named | found
    policies = {name: rows if name in named else other for name in names}
    whole = layout.of_plan(dict.fromkeys(names, other), 7, plan)
    one = layout.of_plan(policies, 7, plan)
    two = layout.with_tables(one, dict.fromkeys(sorted(found), rows))
    for made, gone in ((one, named), (two, tables)):
        left = [[name for name in members if name not in gone] for members in whole.messages]
        assert [list(members) for members in made.messages] == [one for one in left if one]
        kept = {name: way for name, way in whole.communicators.items() if name not in gone}
        assert made.communicators == kept
        for name in names:
            assert made.policies[name] == (rows if name in gone else whole.policies[name]), name
        assert made.plan is plan
    assert not found or two.fingerprint != one.fingerprint
    planned = {name for message in plan.messages for name in message.members}
    notes = two.notes(found)
    for start, expected in (
        ("Sent by their rows, and not as the plan says: ", planned & tables),
        ("The plan leaves out ", {*names} - planned - tables),
    ):
        (said,) = [one for one in notes if one.startswith(start)] or [""]
        assert {name for name in names if name in said} == expected, (start, notes)
    words = sum(
        int(number) for number in re.findall(r"(\d+)(?: parameters?)? (?:un|as|comp)", notes[0])
    )
    assert words == len(planned - tables), notes
    assert layout.in_plans(policies) == {name: other for name in names if name not in named}
    layout.expect_schedule("auto", policies, dr.Allgather())
    assert layout.ways_of(policies) == ("dense", "fp16", "codec")
    assert layout.ways_of(policies, sums_float16=False) == ("dense", "codec")


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_never_sends_less_than_the_codec(seed):
    """The user's ratio is not replaced by a smaller one without a word."""
    draw = random.Random(seed)
    names = [f"p{number}" for number in range(draw.randint(1, 5))]
    ratios = {name: 10 ** draw.uniform(-3, 0) for name in names}
    codecs = {name: dr.Codec(dr.TopK(ratio)) for name, ratio in ratios.items()}
    factors = [draw.choice((1.0, 1 / (1 / 3) / 3, draw.uniform(0.2, 5))) for _ in names]
    densities = {name: min(factor * ratios[name], 1.0) for name, factor in zip(names, factors)}
    plan = plan_of(*(Message((one,), "codec", densities[one], "Allgather") for one in names))
    policies = {one: Policy("codec", codecs[one], dr.Residual()) for one in names}
    smaller = [one for one in names if densities[one] < ratios[one] * (1 - 1e-9)]
    if not smaller:
        layout.expect_schedule(plan, policies, dr.Allgather())
        return
    first = smaller[0]
    message = re.escape(
        f"plan: expected densities of at least {ratios[first]:g}, which the codec keeps of {first},"
        f" got {densities[first]:g}; make a plan with deepreduce-plan --density {ratios[first]:g}"
    )
    with pytest.raises(dr.InvalidArgumentError, match=message):
        layout.expect_schedule(plan, policies, dr.Allgather())


@pytest.mark.parametrize(
    ("schedule", "communicator", "message"),
    [
        (
            "auto",
            dr.Auto(),
            "schedule: expected communicator=Allgather(), the default, got Auto(); leave out"
            " communicator=, because a plan chooses",
        ),
        ("plan.json", dr.Allgather(), "got 'plan.json'; write schedule=dr.schedule.Plan.load("),
        (Path("plan"), dr.Allgather(), "; write schedule=dr.schedule.Plan.load('plan')"),
        ("always", dr.Allgather(), "got 'always'"),
    ],
)
def test_a_schedule_that_is_refused(schedule, communicator, message):
    with pytest.raises(dr.InvalidArgumentError) as refused:
        layout.expect_schedule(schedule, {}, communicator)
    assert message in str(refused.value)
    assert ("Plan.load" in message) == ("Plan.load" in str(refused.value))


def test_a_plan_for_another_codec():
    """There is a warning, unless it is from layer times and the codec is the default one."""
    own = dr.Codec(dr.TopK(0.01), index=dr.Rice())
    message = Message(("one",), "codec", 0.1, "Allgather")
    for codec, made_for, differs in (
        (own, repr(own), False),
        (own, repr(dr.Codec(dr.TopK(0.02))), True),
        (own, "the default codec", True),
        (dr.recommended_codec(), "the default codec", False),
        (dr.recommended_codec(), repr(dr.recommended_codec()), False),
    ):
        plan = Plan((message, Message(("two",))), (), 0.0, "none", made_for, 2, 1, "none")
        policies = {"one": Policy("codec", codec), "two": Policy("codec", dr.Codec(dr.TopK(0.5)))}
        for ranks in (1, 2, 3):
            found = layout.differences_of(plan, policies, ranks)
            expected = []
            if ranks == 3:
                expected.append("the plan was made for 2 ranks, and this job has 3; its")
            if differs:
                expected.append(
                    f"the plan was made for {made_for}, and this compressor has {codec!r}; its"
                )
            assert len(found) == len(expected) and all(map(str.startswith, found, expected))
    for schedule in (None, "auto", plan_of(Message(("one",), "dense"))):
        assert layout.differences_of(schedule, policies, 2) == []


@pytest.mark.parametrize("seed", range(10))
def test_what_a_plan_leaves_out_is_said(seed):
    draw = random.Random(seed)
    codec = Policy("codec", dr.Codec(dr.TopK(0.1)), dr.Residual())
    policies = {f"p{number}": draw.choice((codec, Policy("dense"))) for number in range(12)}
    planned = [name for name in policies if draw.random() < seed / 10]
    messages = [Message((name,)) for name in planned]
    said, *notes = layout.of_plan(policies, 0, plan_of(*messages)).notes()
    assert said.startswith("Schedule: ")
    left = [name for name in policies if policies[name] == codec and name not in planned]
    assert len(notes) == bool(left)
    for note in notes:
        assert note.startswith(
            f"The plan leaves out {len(left)} of the compressed parameters, sent"
        )
        assert ", ".join(left[:5]) in note and (f" and {len(left) - 5} more." in note) == (
            len(left) > 5
        )


class WithoutPutBack(dr.Residual):
    """A memory that takes nothing back: :meth:`put_back` is that of the base class."""

    put_back = Memory.put_back


class WithTwoArrays(dr.Residual):
    state = ("residual", "other")


def policy_with(memory):
    return Policy("codec", dr.Codec(dr.TopK(0.1)), memory)


def test_the_communicator_of_a_plan_needs_a_memory_that_takes_back():
    policies = {"one": policy_with(WithoutPutBack())}
    layout.of_plan(policies, 0, plan_of(Message(("one",), "codec", 0.1, "Allgather")))
    with pytest.raises(dr.InvalidArgumentError, match="put_back method, which SplitAllgather"):
        layout.of_plan(policies, 0, plan_of(Message(("one",), "codec", 0.1, "SplitAllgather")))
    assert layout.communicators_of(policies) == ("Allgather",)
    everything = {"one": policy_with(dr.Residual()), "two": Policy("dense")}
    assert set(layout.communicators_of(everything)) == set(COMMUNICATORS)


@pytest.mark.parametrize("way", ["dense", "fp16"])
def test_only_one_array_can_be_added_to_an_uncompressed_gradient(way):
    plan = plan_of(Message(("one",), way))
    layout.of_plan({"one": policy_with(dr.Residual())}, 0, plan)
    with pytest.raises(dr.InvalidArgumentError, match="expected Residual or NoMemory"):
        layout.of_plan({"one": policy_with(WithTwoArrays())}, 0, plan)


def test_times_are_those_of_all_last_steps():
    """Optimizers that share a compressor may take turns."""
    times = StepTimes()
    for number in range(5):
        times.begin(float(number))
        name = "often" if number % 3 else "rarely"
        times.gradients((name,), name, number + 0.25, number + 0.25)
    assert times.ready == {"rarely": 0.25, "often": 0.25}


def test_without_an_optimizer_the_times_of_steps_do_not_grow_without_limit():
    times = StepTimes()
    for _ in range(3 * _MOST_EVENTS):
        times.message("weight", 0.0, 1.0)
    assert len(times._events) == _MOST_EVENTS


@pytest.mark.parametrize("seed", range(20))
def test_time_0_is_the_first_gradient(seed):
    """It arrives just before its step begins, because it is what begins it."""
    draw, times, clock = random.Random(seed), StepTimes(), 5.0
    for _ in range(3):
        for number in range(4):
            started = clock
            clock += draw.uniform(0, 1e-4)  # the handshake, and what looks for the parameter
            if number == 0:
                times.begin(clock)
            clock += draw.uniform(0, 1e-3)
            times.gradients((f"p{number}",), f"p{number}", started, clock)
            clock += draw.uniform(0, 1e-2)
        times.result("p0", clock, clock + 1e-3)
        clock += 1e-2
    events = times.timeline().events
    assert min(event.start for event in events) == 0
    first = min(events, key=lambda event: event.start)
    assert (first.name, first.kind) == ("p0", "encode")
    assert min(times.ready.values()) == times.ready["p0"] == 0


def test_waiting_is_neither_decoding_nor_backward():
    """Backward ends with the last gradient, and decoding begins when the message is there."""
    times = StepTimes()
    times.begin(0.0)
    times.gradients(("last",), "last", 0.0, 0.5)
    times.gradients(("first",), "first", 2.0, 2.5)
    times.message("last … first (2)", 2.5, 6.0)
    times.result("last", 4.0, 7.0)  # it waits for the message until 6
    times.result("first", 7.0, 7.5)
    times.begin(9.0)
    found = {
        (event.kind, event.name): (event.start, event.end) for event in times.timeline().events
    }
    assert found == {
        ("encode", "last"): (0.0, 0.5),
        ("backward", "first"): (0.5, 2.0),
        ("encode", "first"): (2.0, 2.5),
        ("network", "last … first (2)"): (2.5, 6.0),
        ("decode", "last"): (6.0, 7.0),
        ("decode", "first"): (7.0, 7.5),
        ("update", "until the next step"): (7.5, 9.0),
    }
    waits = times.timeline().waits()
    assert waits["network"] == 3.5 and waits["backward"] == 1.5 and waits["decode"] == 1.5


def test_small_tensors_are_sent_uncompressed_whatever_a_plan_says():
    codec = Policy("codec", dr.Codec(dr.TopK(0.01)), dr.Residual())
    policies = {"weight": codec, "bias": Policy("dense", None, dr.Residual())}
    plan = plan_of(Message(("weight", "bias"), "codec", 0.05, "Allgather"))
    found = layout.of_plan(policies, 0, plan)
    assert found.messages == (("weight",),) and found.policies["bias"] == policies["bias"]
    said, kept = found.notes()
    assert "1 parameter compressed in 1 message" in said and "bias" in kept, (said, kept)
