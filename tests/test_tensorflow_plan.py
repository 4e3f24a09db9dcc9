"""Test plans on TensorFlow: the way and the density of each variable."""

import os

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.schedule import Message, Plan

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
hvd = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice())


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()


def variables(names="abcd"):
    return [tf.Variable(tf.zeros([40, 30]), name=name) for name in names]


def compressor(schedule, listed=None):
    named = list(zip("abcd", variables() if listed is None else listed))
    return dr.Compressor(CODEC, parameters=named, schedule=schedule)


def plan_of(*messages):
    return Plan(messages, (), 0.0, "none", "none", 2, 1, "none")


def test_a_plan_sets_ways_and_densities():
    messages = (
        Message(("d", "c"), "codec", 0.2, "Allgather"),
        Message(("b",), "fp16"),
        Message(("a",)),
    )
    plan = plan_of(*messages)
    comp = compressor(plan)
    denser = dr.Codec(dr.TopK(0.2), index=dr.Rice())
    expected = {
        "a": Policy("dense"),
        "b": Policy("fp16"),
        "c": Policy("codec", denser, dr.Residual()),
        "d": Policy("codec", denser, dr.Residual()),
    }
    assert comp.policies == expected and comp.plan == plan
    kept = {name: list(one["memory"]) for name, one in comp.state_dict()["parameters"].items()}
    assert kept == {"a": [], "b": [], "c": ["residual"], "d": ["residual"]}


def test_a_plan_for_another_codec_and_what_it_leaves_out():
    less = plan_of(Message(("a", "b"), "codec", 0.01, "Allgather"))
    with pytest.raises(dr.InvalidArgumentError, match="at least 0.05, which .* of a, got 0.01"):
        compressor(less)
    with pytest.warns(UserWarning, match=r"plan was made for none, .* has Codec\(TopK\(ratio=0.05"):
        comp = compressor(plan_of(Message(("a", "b"), "codec", 0.1, "Allgather")))
    words = "2 parameters compressed in 1 message at a density of 0.1"
    assert comp.adapter.notes() == [
        f"Schedule: {words}.",
        "The plan leaves out 2 of the compressed parameters, sent as without a plan: c, d.",
    ]
    assert f"a plan of {words}, with CRC-32" in repr(comp)


def test_messages_as_groups():
    listed = variables()
    plan = plan_of(
        Message(("d", "b"), "codec", 0.2, "Allgather"),
        Message(("c",), "fp16"),
        Message(("a",), "codec", 0.05, "Allgather"),
    )
    groups = dr.tensorflow.message_groups(compressor(plan, listed))
    assert [list(map(id, group)) for group in groups] == [
        [id(listed[3]), id(listed[1])],
        [id(listed[0])],
    ]


def test_groups_need_a_plan():
    with pytest.raises(dr.InvalidArgumentError, match="expected a compressor with a plan"):
        dr.tensorflow.message_groups(compressor(None))


def test_groups_need_different_names():
    """With groups, Horovod loses gradients of equal names even if they are in no group."""
    listed = variables("abba")
    for messages in (
        [Message(tuple("dcba"), "codec", 0.05, "Allgather")],
        [Message(("a",), "codec", 0.05, "Allgather"), Message(tuple("bcd"), "dense")],
    ):
        comp = compressor(plan_of(*messages), listed)
        with pytest.raises(dr.InvalidArgumentError, match="several named a:0, b:0"):
            dr.tensorflow.message_groups(comp)


def test_auto_needs_eager_execution():
    with (
        tf.Graph().as_default(),
        pytest.raises(dr.InvalidArgumentError, match="expected None or a plan in a graph"),
    ):
        compressor("auto", [tf.compat.v1.get_variable("a", [40, 30], use_resource=True)])


def test_measurements_need_auto():
    for call in (dr.Compressor.profile, lambda one: one.timeline("step.json")):
        with pytest.raises(dr.InvalidArgumentError, match="expected schedule='auto' on TensorFlow"):
            call(compressor(None))


def test_with_other_schedules_the_step_stays_as_it_is():
    """Programs can be decorated whatever their schedule is."""
    comp = compressor(None)
    step = tf.function(lambda number: number + 1)
    assert dr.tensorflow.scheduled(comp)(step) is step
    dr.tensorflow.schedule_callback(comp).on_train_batch_end(0)


def test_auto_before_the_first_step():
    comp = compressor("auto")
    assert comp.plan is None
    assert comp.adapter.notes() == ["Schedule: no plan yet, buckets."]
    with pytest.raises(dr.InvalidArgumentError, match="expected some complete steps"):
        comp.profile()
    with pytest.raises(dr.InvalidArgumentError, match="expected a complete step"):
        comp.timeline("step.json")
    kept = {name: list(one["memory"]) for name, one in comp.state_dict()["parameters"].items()}
    assert kept == {name: ["residual"] for name in "abcd"}
