"""Arguments of the planner: iterators, types of numbers, and what is refused."""

import math

import numpy as np
import pytest
from schedule_profiles import random_network, random_profile

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import (
    Link,
    Message,
    Network,
    Plan,
    Profile,
    Table,
    Traffic,
    finish_seconds,
    finish_with_selection,
    hierarchical,
    lags,
    optimal_merge,
    optimal_merge_with_selection,
    optimal_plan,
    timeline,
    traffic,
)
from deepreduce_hvd.schedule.dag import CODEC


@pytest.fixture(params=range(4))
def job(request):
    """A profile, a network, and messages of its parameters."""
    profile, network = random_profile(request.param, 5), random_network(request.param)
    messages = [
        Message((part.name,), *(() if number % 2 else (CODEC, 0.05, "Allgather")))
        for number, part in enumerate(profile.parameters)
    ]
    return profile, network, messages


def test_iterators_are_as_good_as_lists(job):
    profile, network, messages = job
    assert timeline(profile, network, iter(messages)) == timeline(profile, network, messages)
    assert Plan.of(profile, network, iter(messages)) == Plan.of(profile, network, messages)
    assert finish_seconds([0, 1], [1, 2], iter([1, 1]), lambda size: 1 + size) == 5
    planned = optimal_plan(profile, network, ways=("dense", "codec"), groups=[2, 3])
    assert planned == optimal_plan(
        profile,
        network,
        ways=iter(("dense", "codec")),
        groups=iter([2, 3]),
        communicators=iter(("Allgather", "SplitAllgather", "RecursiveDoubling")),
    )


@pytest.mark.parametrize("kind", [np.float32, np.float64, float])
def test_numbers_of_numpy_can_be_saved(job, kind, tmp_path):
    profile, network, _ = job
    of_parts = [
        Message((part.name,), CODEC, kind(0.125), "Allgather") for part in profile.parameters
    ]
    for plan in (
        optimal_plan(profile, network, density=kind(0.125)),
        Plan.of(profile, network, of_parts),
    ):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
    assert traffic("Allgather", 5, 300, np.int64(4)) == traffic("Allgather", 5, 300, 4)
    across = Traffic(1, 1, 1.0)
    assert hierarchical(across, 10, np.int32(2), 5.0) == hierarchical(across, 10, 2, 5.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_cost_may_divide_by_the_size():
    """Costs are tried with sizes that do not occur. A rate that depends on the size has none at 0."""

    def cost(size):
        return size / (size / (size + 1.0))

    assert optimal_merge([0, 1], [5, 5], cost) == ([2], 12.0)
    assert optimal_merge_with_selection([0, 1], [5, 5], lambda size: 0.0, cost) == ([2], 12.0)


@pytest.mark.parametrize("grouping", [[1], [0, 2], [-1, 3], [5], [1.0, 1.0], [True, 1], []])
def test_groupings_that_are_refused(grouping):
    message = "grouping: expected lengths of at least 1 that add up to 2, got "
    with pytest.raises(InvalidArgumentError, match=message):
        finish_seconds([0, 1], [1, 2], grouping, lambda size: 1 + size)
    with pytest.raises(InvalidArgumentError, match=message):
        finish_with_selection([0, 1], [1, 2], grouping, lambda size: 0.1, lambda size: 1 + size)
    with pytest.raises(InvalidArgumentError, match="groups: expected lengths of at least 1"):
        optimal_plan(random_profile(0, 2), random_network(0), groups=grouping)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((),), r"members: expected a tuple of names of parameters, got \(\)"),
        (("ab",), "members: expected a tuple of names of parameters, got ab"),
        (((1,),), "members: expected a tuple of names"),
        ((("w",), "sparse"), "way: expected one of dense, fp16, codec, got 'sparse'"),
        ((("w",), CODEC, "x", "Allgather"), r"density: expected a number in \(0, 1\], got 'x'"),
        ((("w",), CODEC, math.nan, "Allgather"), r"density: expected a number in \(0, 1\], got nan"),
        ((("w",), CODEC, 0.1), "expected a communicator for payloads, .* got 'Allreduce'"),
        ((("w",), CODEC, 0.1, "Foo"), "expected a communicator for payloads, .* got 'Foo'"),
        ((("w",), "dense", None, "Allgather"), "expected no density, and Allreduce, got None and Allg"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Message(*arguments)


def test_other_arguments_that_are_refused(job):
    profile, network, messages = job
    with pytest.raises(InvalidArgumentError, match="max_compression: expected a finite number"):
        lags(profile, network, max_compression=math.inf)
    with pytest.raises(InvalidArgumentError, match="density: expected a number in"):
        optimal_plan(profile, network, density="x")
    for points in (((0, 1), (5,)), 5, (), ((0, 1), ("5", 2))):
        with pytest.raises(InvalidArgumentError, match=r"table: expected at least 2 \(bytes"):
            Table(points)
    with pytest.raises(InvalidArgumentError, match="network link: expected a Link, .* got 1gbit"):
        Network(2, "1gbit")
    with pytest.raises(InvalidArgumentError, match="link: expected text such as 100mbit"):
        Link.parse(5)
    across = Traffic(1, 1, 1.0)
    for arguments in ((10, 0, 5.0), (10, 2.5, 5.0), (-10, 2, 5.0), (10, 2, math.nan)):
        with pytest.raises(InvalidArgumentError, match="hierarchical"):
            hierarchical(across, *arguments)
    empty = Plan.of(profile, network, messages).to_json()
    start = empty.index('"messages"')
    empty = f'{empty[:start]}"messages": [],\n {empty[empty.index("events") - 1 :]}'
    with pytest.raises(InvalidArgumentError, match="messages: expected at least one, got none"):
        Plan.from_json(empty)


@pytest.mark.parametrize("seed", range(40))
def test_the_rest_of_backward_is_used_where_allgathers_overlap(seed):
    """The last message ends with backward, or as early as with the smallest density everywhere."""
    random = np.random.default_rng(seed)
    profile = random_profile(seed, 6, encode=float(random.choice((0.0, 1.0))))
    gather, reduce = (
        Table(tuple(zip((1024.0, 2.0**24), np.sort(10 ** random.uniform(-4, -1.5, 2)).tolist())))
        for _ in range(2)
    )
    data = {name: getattr(profile, name) for name in Profile.__dataclass_fields__}
    overlap = float(random.uniform(0.1, 2)) * gather.points[0][1]
    profile = Profile(
        **{**data, "hosts": 2, "allgather": gather, "allreduce": reduce, "gather_overlap": overlap}
    )
    network = Network(2, profile.link())

    def end_of(messages):
        events = timeline(profile, network, messages).events
        return [event.end for event in events if event.track == "network"][-1]

    def end_of_backward(messages):
        events = timeline(profile, network, messages).events
        return max(event.end for event in events if event.kind in ("backward", "encode"))

    least = [Message((part.name,), CODEC, 0.01, "Allgather") for part in profile.parameters]
    chosen = lags(profile, network, max_compression=100, hide_behind="rest")
    limit = max(end_of(least), end_of_backward(least))
    assert end_of(chosen) <= limit * (1 + 1e-9)
