"""Groupings: exact programs against exhaustive search, and the published rules."""

import itertools
import math

import numpy as np
import pytest

from deepreduce_hvd import schedule
from deepreduce_hvd.errors import InvalidArgumentError


def groupings(count):
    """Yield all groupings of ``count`` gradients."""
    for cuts in itertools.product((False, True), repeat=max(count - 1, 0)):
        grouping = [1] if count else []
        for cut in cuts:
            if cut:
                grouping.append(1)
            else:
                grouping[-1] += 1
        yield grouping


def exhaustive(ready, sizes, cost):
    """Return the earliest finish by trying all groupings, one gradient at a time.

    Every grouping is walked: a node of the tree is a prefix, an edge a message.
    """
    count = len(ready)
    seconds = {
        (first, last): cost(sum(sizes[first:last]))
        for first in range(count)
        for last in range(first + 1, count + 1)
    }
    best = math.inf

    def walk(first, finish):
        nonlocal best
        if first == count:
            best = min(best, finish)
        for last in range(first + 1, count + 1):
            walk(last, max(finish, ready[last - 1]) + seconds[first, last])

    walk(0, 0.0)
    return best


def instances(number, most, seed=0):
    """Yield (ready, sizes, cost): integers, so that every sum is exact and ties are common."""
    random = np.random.default_rng(seed)
    for index in range(number):
        count = int(random.integers(0, most + 1))
        ready = np.cumsum(random.integers(0, 12, count)).tolist()
        sizes = random.integers(0, 9, count).tolist()
        alpha, beta = random.integers(0, 15), random.integers(0, 4)
        steps = random.integers(0, 30, 9 * most + 1)  # any cost, by a table
        growing = np.sort(steps)
        kind = index % 3
        if kind == 0:
            yield ready, sizes, lambda size, a=int(alpha), b=int(beta): a + b * size
        elif kind == 1:
            yield ready, sizes, lambda size, table=growing: table[size].astype(float)
        else:
            yield ready, sizes, lambda size, table=steps: float(table[int(size)])


@pytest.mark.parametrize(
    "seed, number, most", [(0, 2_500, 8), pytest.param(1, 10_000, 12, marks=pytest.mark.slow)]
)
def test_optimal_merge_equals_exhaustive_search(seed, number, most):
    for ready, sizes, cost in instances(number, most, seed):
        grouping, finish = schedule.optimal_merge(ready, sizes, cost)
        assert finish == exhaustive(ready, sizes, cost)
        assert finish == schedule.finish_seconds(ready, sizes, grouping, cost)


def test_ties_prefer_long_messages():
    def longest_last(ready, sizes, cost):
        if not ready:
            return []
        best = exhaustive(ready, sizes, cost)
        for first in range(len(ready)):
            before = exhaustive(ready[:first], sizes[:first], cost)
            if max(before, ready[-1]) + cost(sum(sizes[first:])) == best:
                return [*longest_last(ready[:first], sizes[:first], cost), len(ready) - first]
        raise AssertionError("no last message gives the best finish")

    for ready, sizes, cost in instances(300, 6, seed=2):
        assert schedule.optimal_merge(ready, sizes, cost)[0] == longest_last(ready, sizes, cost)


def test_equal_finish_is_one_message():
    assert schedule.optimal_merge([0, 0, 0], [1, 1, 1], lambda size: size) == ([3], 3.0)


def test_cost_on_arrays_and_on_numbers():
    calls = []

    def on_arrays(size):
        calls.append(np.shape(size))
        return 1.0 + np.maximum(size, 4)

    def on_numbers(size):
        assert isinstance(size, int)
        return 1.0 + (size if size > 4 else 4)

    def constant(size):
        return 3.0

    random = np.random.default_rng(5)
    ready, sizes = np.cumsum(random.random(40)), random.integers(0, 6, 40)
    assert schedule.optimal_merge(ready, sizes, on_arrays) == schedule.optimal_merge(
        ready, sizes, on_numbers
    )
    # one call per gradient, beside those that find out whether arrays work
    assert sum(shape != () for shape in calls) == 40 + 1
    assert schedule.optimal_merge([0, 1, 2], [1, 2, 3], constant) == ([3], 5.0)


def test_a_cost_that_mixes_its_elements_is_called_with_numbers():
    # accepts arrays, but each result depends on the whole array
    mixing = lambda size: 1.0 + np.asarray(size) / max(1, np.size(size))  # noqa: E731
    ready, sizes = [0, 1, 5, 6], [4, 3, 2, 1]
    assert schedule.optimal_merge(ready, sizes, mixing) == schedule.optimal_merge(
        ready, sizes, lambda size: 1.0 + size
    )


def test_infinite_cost_forbids_a_message():
    at_most = lambda size: 1.0 if size <= 4 else math.inf  # noqa: E731
    assert schedule.optimal_merge([0, 0, 0], [2, 2, 2], at_most) == ([1, 2], 2.0)
    with pytest.raises(InvalidArgumentError, match="allows at least one grouping"):
        schedule.optimal_merge([0], [5], at_most)


def test_no_gradients_and_one():
    assert schedule.optimal_merge([], [], lambda size: 1.0) == ([], 0.0)
    assert schedule.optimal_merge([2], [3], lambda size: size) == ([1], 5.0)
    assert schedule.single_message([], [], lambda size: 1.0) == ([], 0.0)
    assert schedule.optimal_merge_with_selection([], [], lambda x: 1.0, lambda x: 1.0) == ([], 0.0)


@pytest.mark.parametrize(
    "ready, sizes, cost, text",
    [
        ([1, 0], [1, 1], lambda size: 1.0, "ascending"),
        ([0, 1], [1], lambda size: 1.0, r"\(2,\) and \(1,\)"),
        ([0, math.nan], [1, 1], lambda size: 1.0, "finite"),
        ([0, 1], [1, -1], lambda size: 1.0, "at least 0"),
        ([0, 1], ["a", 1], lambda size: 1.0, "arrays of numbers"),
        ([0, 1], [1, 1], lambda size: -1.0, "at least 0 seconds"),
        ([0, 1], [1, 1], lambda size: math.nan, "at least 0 seconds"),
    ],
)
def test_wrong_arguments(ready, sizes, cost, text):
    with pytest.raises(InvalidArgumentError, match=text):
        schedule.optimal_merge(ready, sizes, cost)


def test_wrong_groupings_and_constants():
    with pytest.raises(InvalidArgumentError, match="add up to 2"):
        schedule.finish_seconds([0, 1], [1, 1], [1], lambda size: 1.0)
    with pytest.raises(InvalidArgumentError, match="alpha"):
        schedule.mg_wfbp([0], [1], -1.0, 1.0)


def published_mg_wfbp(ready, sizes, alpha, beta):
    """Return the grouping of the published loop: masses move to the next layer, in place."""
    count = len(ready)
    mass, seconds = list(sizes), [alpha + beta * size for size in sizes]
    alone = [False] * count

    def starts():
        found = []
        for layer in range(count):
            before = found[-1] + seconds[layer - 1] if layer else 0.0
            found.append(max(before, ready[layer]))
        return found

    for layer in range(count - 1):
        begin = starts()
        if (
            ready[layer + 1] < begin[layer] + seconds[layer]
            and ready[layer + 1] - begin[layer] < alpha
        ):
            mass[layer + 1] += mass[layer]
            mass[layer], seconds[layer] = 0, 0.0
            seconds[layer + 1] = alpha + beta * mass[layer + 1]
            alone[layer] = True
    grouping, length = [], 0
    for merged in alone:
        length += 1
        if not merged:
            grouping.append(length)
            length = 0
    return grouping


def test_mg_wfbp_is_the_published_loop_and_never_better_than_the_optimum():
    random = np.random.default_rng(11)
    missed = 0
    for _ in range(1_000):
        count = int(random.integers(3, 8))
        ready = np.cumsum(random.integers(0, 12, count)).tolist()
        sizes = random.integers(0, 12, count).tolist()
        grouping, finish = schedule.mg_wfbp(ready, sizes, 8, 1)
        assert grouping == published_mg_wfbp(ready, sizes, 8, 1)
        best = schedule.optimal_merge(ready, sizes, lambda size: 8 + size)[1]
        assert best <= finish == schedule.finish_seconds(ready, sizes, grouping, lambda n: 8 + n)
        missed += best < finish
    assert missed > 100  # the greedy rule is not optimal


def test_the_known_example_of_greedy_merging():
    assert schedule.mg_wfbp([0, 9, 18], [5, 0, 0], 10, 1) == ([3], 33.0)
    assert schedule.optimal_merge([0, 9, 18], [5, 0, 0], lambda size: 10 + size) == ([1, 2], 28.0)


def test_wfbp_and_single_message():
    cost = lambda size: 1 + size  # noqa: E731
    assert schedule.wfbp([0, 1, 5], [2, 1, 1], cost) == ([1, 1, 1], 7.0)
    assert schedule.single_message([0, 1, 5], [2, 1, 1], cost) == ([3], 10.0)


def with_selection_instances(number, most, seed):
    random = np.random.default_rng(seed)
    for index in range(number):
        count = int(random.integers(1, most + 1))
        ready = np.cumsum(random.integers(0, 9, count)).tolist()
        elements = random.integers(1, 9, count).tolist()
        if index % 2:
            select, table = random.integers(0, 4), random.integers(0, 20, 9 * most + 1)
            yield ready, elements, lambda x, s=int(select): s * x, lambda x, t=table: float(t[x])
        else:
            tables = random.integers(0, 12, (2, 9 * most + 1)).astype(float)
            yield ready, elements, lambda x, t=tables: t[0][x], lambda x, t=tables: t[1][x]


def test_merging_with_selection_equals_exhaustive_search():
    for ready, elements, selection, cost in with_selection_instances(300, 8, 3):
        grouping, finish = schedule.optimal_merge_with_selection(ready, elements, selection, cost)
        every = [
            schedule.finish_with_selection(ready, elements, one, selection, cost)
            for one in groupings(len(ready))
        ]
        assert finish == min(every)
        assert finish == schedule.finish_with_selection(ready, elements, grouping, selection, cost)


def test_finish_with_selection_follows_the_two_clocks():
    # compute: 2, selection 1 -> 3; backward 4 more -> 7, selection 1 -> 8. network: 3 to 8, 8 to 13
    assert schedule.finish_with_selection([2, 6], [1, 1], [1, 1], lambda x: x, lambda x: 5) == 13
    # compute: 6, selection 2 -> 8; network: 8 to 13
    assert schedule.finish_with_selection([2, 6], [1, 1], [2], lambda x: x, lambda x: 5) == 13


def test_omgs_is_between_the_optimum_and_twice_it():
    random = np.random.default_rng(4)
    worst = 1.0
    for _ in range(300):
        count = int(random.integers(2, 8))
        ready = np.cumsum(random.random(count)).tolist()
        elements = random.integers(10, 1_000, count).tolist()
        selection = schedule.selection_cost(10.0 ** random.uniform(-6, -4))
        alpha, beta = random.uniform(0, 0.5), 10.0 ** random.uniform(-5, -3)
        cost = lambda x, a=alpha, b=beta: 2 * (a + b * x)  # noqa: E731
        grouping, finish = schedule.omgs(ready, elements, selection, cost)
        assert finish == schedule.finish_with_selection(ready, elements, grouping, selection, cost)
        best = schedule.optimal_merge_with_selection(ready, elements, selection, cost)[1]
        worst = max(worst, finish / best)
        assert finish >= best
    assert 1.0 < worst < 2.0


def test_omgs_subtracts_the_selection_of_the_next_gradient_once():
    # Merging delays the message by backward and the larger selection: 1 + 8 - 4 = 5 > 4, the start
    # that one message saves. With a second subtraction of 4 the delay would be 1, and it would
    # merge.
    selection, cost = (lambda x: 4 * x), (lambda x: 4 + 0 * x)
    assert schedule.omgs([0, 1], [1, 1], selection, cost)[0] == [1, 1]
    # the first two gradients may be apart, and are merged where the delay is small
    assert schedule.omgs([0, 0], [1, 1], lambda x: 0 * x, cost)[0] == [2]


def test_selection_cost_is_x_log2_x():
    assert schedule.selection_cost(2.0)(8) == 48.0
    assert schedule.selection_cost(2.0)(0) == 0.0
