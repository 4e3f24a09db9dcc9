"""Plans: against exhaustive search, never slower than what they compete with, and as JSON."""

import dataclasses
import itertools
import json
import random

import pytest
from schedule_profiles import random_network, random_profile

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import Link, Message, Network, Plan, optimal_plan, timeline
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16, WAYS, Model
from deepreduce_hvd.schedule.optimum import _Clocks
from deepreduce_hvd.schedule.rules import RULES, predict


def all_schedules(names, density):
    """Yield every grouping with every way for each message."""
    for cuts in itertools.product((False, True), repeat=len(names) - 1):
        groups = [[names[0]]]
        for name, cut in zip(names[1:], cuts):
            if cut:
                groups.append([name])
            else:
                groups[-1].append(name)
        for ways in itertools.product(WAYS, repeat=len(groups)):
            yield [
                Message(tuple(group), way, density, "Allgather")
                if way == CODEC
                else Message(tuple(group), way)
                for group, way in zip(groups, ways)
            ]


@pytest.mark.parametrize("seed", range(25))
def test_grouping_and_ways_equal_exhaustive_search(seed):
    profile = random_profile(seed, 1 + seed % 5, encode=30.0, decode=0.0)
    network = random_network(seed)
    names = [part.name for part in profile.parameters]
    plan = optimal_plan(profile, network, communicators=["Allgather"])
    best = min(
        timeline(profile, network, messages).step_seconds for messages in all_schedules(names, 0.01)
    )
    assert plan.step_seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(25))
def test_ways_of_given_groups_equal_exhaustive_search(seed):
    profile = random_profile(seed, 2 + seed % 5, encode=30.0, decode=0.0)
    network, draw = random_network(seed), random.Random(seed)
    names = [part.name for part in profile.parameters]
    groups = []
    while sum(groups) < len(names):
        groups.append(draw.randint(1, len(names) - sum(groups)))
    plan = optimal_plan(profile, network, communicators=["Allgather"], groups=groups)
    assert [len(message.members) for message in plan.messages] == groups
    best = min(
        timeline(profile, network, messages).step_seconds
        for messages in all_schedules(names, 0.01)
        if [len(message.members) for message in messages] == groups
    )
    assert plan.step_seconds == pytest.approx(best, rel=1e-9)
    for rule in ("plan", "codec", "dense", "fp16"):
        predicted, messages = predict(rule, profile, network, groups=groups)
        assert [len(message.members) for message in messages] == groups
        assert plan.step_seconds <= predicted.step_seconds * (1 + 1e-8), rule


def test_groups_that_are_not_those_of_the_parameters():
    profile, network = random_profile(0, 3), random_network(0)
    for groups in ([1, 1], [0, 3], [4]):
        with pytest.raises(InvalidArgumentError, match="lengths of at least 1 that add up to 3"):
            optimal_plan(profile, network, groups=groups)
    with pytest.raises(InvalidArgumentError, match="None for LAGS"):
        predict("LAGS", profile, network, groups=[3])


@pytest.mark.parametrize("seed", range(25))
def test_never_slower_than_the_rules(seed):
    profile, network = random_profile(seed, 12, encode=5.0, decode=5.0), random_network(seed)
    plan = optimal_plan(profile, network)
    for rule in ("dense", "fp16", "codec", "LAGS", "one message", "WFBP", "MG-WFBP"):
        step = predict(rule, profile, network)[0].step_seconds
        assert plan.step_seconds <= step * (1 + 1e-8), rule


@pytest.mark.parametrize("seed", range(4))
def test_never_slower_where_the_program_thins_out_its_states(seed):
    profile, network = random_profile(seed, 80, encode=5.0, decode=5.0), random_network(seed)
    plan = optimal_plan(profile, network)
    for rule in set(RULES) - {"OMGS", "plan"}:
        step = predict(rule, profile, network)[0].step_seconds
        assert plan.step_seconds <= step * (1 + 1e-8), rule


@pytest.mark.parametrize("seed", range(12))
def test_no_message_can_be_denser(seed):
    profile, network = random_profile(seed, 8), random_network(seed)
    plan = optimal_plan(profile, network)
    for number, message in enumerate(plan.messages):
        if message.way == DENSE:
            continue
        better = [Message(message.members)]
        if message.way == CODEC:
            assert message.density >= profile.density * (1 - 1e-12)
            better.append(Message(message.members, FP16))
            assert message.density <= profile.max_density
            if message.density < 0.99 * profile.max_density:
                better.append(dataclasses.replace(message, density=message.density * 1.001))
        for one in better:
            changed = [*plan.messages[:number], one, *plan.messages[number + 1 :]]
            assert timeline(profile, network, changed).step_seconds > plan.step_seconds


@pytest.mark.parametrize("seed", range(10))
def test_clocks_are_those_of_the_timeline(seed):
    profile, network = random_profile(seed, 10), random_network(seed)
    for rule in set(RULES) - {"serial", "OMGS"}:
        found, messages = predict(rule, profile, network)
        clocks = _Clocks(Model(profile, network), messages)
        assert clocks.step_seconds() == pytest.approx(found.step_seconds, rel=1e-12)


def test_what_hides_entirely_goes_dense():
    profile = random_profile(5, 6)
    plan = optimal_plan(profile, Network(4, Link.parse("100gbit:1us")))
    assert DENSE in {message.way for message in plan.messages[:-1]}
    assert plan.kept(profile) > 0.5
    slow = optimal_plan(profile, Network(4, Link.parse("10mbit:100us")))
    assert all(message.way == CODEC for message in slow.messages)
    assert slow.kept(profile) < plan.kept(profile)


def test_one_host_sends_everything_dense():
    plan = optimal_plan(random_profile(5, 6), Network(1, Link.parse("1gbit")))
    assert {message.way for message in plan.messages} == {DENSE}


def test_ways_and_densities_can_be_limited():
    profile, network = random_profile(6, 6), Network(4, Link.parse("100mbit"))
    assert {one.way for one in optimal_plan(profile, network, ways=[DENSE]).messages} == {DENSE}
    assert CODEC not in {
        one.way for one in optimal_plan(profile, network, ways=[FP16, DENSE]).messages
    }
    dense = optimal_plan(profile, network, density=0.3)
    assert all(one.density is None or one.density >= 0.3 for one in dense.messages)
    for arguments, text in (
        ({"ways": ["zip"]}, "some of dense, fp16, codec, got 'zip'"),
        ({"ways": []}, "at least one"),
        ({"density": 0.0}, r"a number in \(0, 1\]"),
        ({"communicators": ["GTopK"]}, "some of Allgather"),
        ({"communicators": ["SplitAllgather"]}, "Allgather among them"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            optimal_plan(profile, network, **arguments)


def test_many_ranks_use_another_communicator():
    profile = random_profile(6, 6, density=0.1)
    plan = optimal_plan(profile, Network(64, Link.parse("1gbit:1us")))
    assert {message.communicator for message in plan.messages} & {
        "SplitAllgather", "RecursiveDoubling"
    }  # fmt: skip
    only = optimal_plan(profile, Network(64, Link.parse("1gbit:1us")), communicators=["Allgather"])
    assert plan.step_seconds <= only.step_seconds * (1 + 1e-9)


def test_two_runs_are_identical_and_json_is_a_round_trip(tmp_path):
    network = random_network(3)
    one, two = (optimal_plan(random_profile(3, 20), network) for _ in range(2))
    assert one == two and one.to_json() == two.to_json()
    one.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == one and loaded.to_json() == one.to_json()
    assert loaded.timeline == timeline(random_profile(3, 20), network, loaded.messages)
    assert one.profile == random_profile(3, 20).digest()
    assert one != optimal_plan(random_profile(4, 20), network)


def test_plans_that_are_refused():
    text = optimal_plan(random_profile(3, 3), random_network(3)).to_json()

    def changed(**fields):
        return json.dumps({**json.loads(text), **fields})

    message = {"members": ["w"], "way": "codec", "density": 0.1, "communicator": "Allgather"}
    for wrong, expected in (
        ("{", "expected JSON"),
        (changed(version=2), "plan version: expected 1, got 2"),
        (changed(format="x"), "plan format"),
        (changed(hosts=0), "plan hosts"),
        (changed(more=1), "also more"),
        (changed(events=[[1]]), "plan events"),
        (changed(events=[["compute", "backward", "w", -1, 2]]), "w start"),
        (changed(events=[["compute", "backward", "w", 3, 2]]), "w end"),
        (changed(events=[["gpu", "backward", "w", 1, 2]]), "event track: expected one of compute"),
        (changed(events=[["compute", "magic", "w", 1, 2]]), "event kind: expected one of forward"),
        (changed(messages=[{**message, "density": 2}]), r"a number in \(0, 1\]"),
        (changed(messages=[{**message, "way": "zip"}]), "message way"),
        (changed(messages=[{**message, "members": []}]), "message members"),
        (changed(messages=[{"members": ["w"]}]), "none named way, density, communicator"),
    ):
        with pytest.raises(InvalidArgumentError, match=expected):
            Plan.from_json(wrong)
