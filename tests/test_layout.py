"""Test layouts of plans, and the times of steps."""

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.planning.step_times import _MOST_EVENTS, StepTimes
from deepreduce_hvd.schedule import Message, Plan


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


def test_without_an_optimizer_the_times_of_steps_do_not_grow_without_limit():
    times = StepTimes()
    for _ in range(3 * _MOST_EVENTS):
        times.message("weight", 0.0, 1.0)
    assert len(times._events) == _MOST_EVENTS
