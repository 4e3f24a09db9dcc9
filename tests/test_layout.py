"""Test layouts of plans, and the times of steps."""

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import Policy
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
