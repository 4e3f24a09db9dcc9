"""Which gradients share a message: exact programs.

Gradients are numbered in the order in which backward makes them ready, from 0. A grouping is the
list of the lengths of consecutive groups: ``[2, 1]`` is one message for the first two gradients and
one for the third. A message starts when its last gradient is ready and the message before it has
ended.

Functions that choose a grouping return ``(grouping, finish)``, where ``finish`` is the time in
seconds at which the last message ends. Time 0 is the start of backward.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepreduce_hvd.schedule.grouping import (
    Cost,
    FloatArray,
    Grouping,
    IndexArray,
    checked,
    checked_grouping,
    cost_of,
    expect_allowed,
    expect_non_negative,
    on_arrays,
)


def finish_seconds(
    ready: npt.ArrayLike, sizes: npt.ArrayLike, grouping: Iterable[int], cost: Cost
) -> float:
    """Return the time in seconds at which the last message of a grouping ends.

    Args:
        ready: (L,) ascending seconds at which the gradients are ready.
        sizes: (L,) bytes.
        grouping: the lengths of the groups, L in total.
        cost: a function from bytes to seconds.

    Returns:
        The time in seconds, from the start of backward.

    Raises:
        InvalidArgumentError: the lengths of the groups do not add up to L, the arrays do not have
            these shapes, or a number is negative or not finite.

    >>> finish_seconds([0, 9, 18], [5, 0, 0], [1, 2], lambda size: 10 + size)
    28.0
    """
    at, amounts = checked("finish_seconds", ready, sizes)
    finish, first = 0.0, 0
    for length in checked_grouping("finish_seconds grouping", grouping, at.size):
        last = first + length
        seconds = cost_of("finish_seconds", cost, amounts[first:last].sum())
        finish = max(finish, float(at[last - 1])) + seconds
        first = last
    return finish


def optimal_merge(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping whose last message ends first.

    The dynamic program is F(0) = 0, F(j) = min over i < j of max(F(i), ready(j)) + cost(bytes of i
    to j). It is exact for every cost, because each gradient is selected and encoded on its own, so
    a payload does not depend on the grouping. The cost need not grow with the bytes.

    Among equally good groupings, the one with the most gradients in the last message is returned;
    the same rule applies to the messages before it. Every prefix is optimal for its gradients.

    Args:
        ready: (L,) ascending seconds at which the gradients are ready for sending.
        sizes: (L,) bytes.
        cost: a function from bytes to seconds, at least 0. Infinity forbids a message. If it also
            accepts an (n,) array and gives the same results, it is called with arrays, and 500
            gradients take milliseconds. Otherwise it is called with single numbers, and the
            L (L + 1) / 2 calls take most of the time.

    Returns:
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, a number is negative or not
            finite, or the cost is infinite for every grouping.

    >>> optimal_merge([0, 9, 18], [5, 0, 0], lambda size: 10 + size)
    ([1, 2], 28.0)
    """
    at, amounts = checked("optimal_merge", ready, sizes)
    seconds_of = on_arrays("optimal_merge", cost, amounts)
    count = at.size
    prefix = np.concatenate([amounts[:0], [0], np.cumsum(amounts)]).astype(amounts.dtype)
    finish = np.zeros(count + 1)
    start = np.zeros(count + 1, dtype=np.intp)
    for end in range(1, count + 1):
        ends = np.maximum(finish[:end], at[end - 1]) + seconds_of(prefix[end] - prefix[:end])
        start[end] = np.argmin(ends)  # the first of equal ones
        finish[end] = ends[start[end]]
    expect_allowed("optimal_merge", float(finish[-1]))
    grouping, end = [], count
    while end:
        grouping.append(int(end - start[end]))
        end = int(start[end])
    return grouping[::-1], float(finish[-1])


def selection_cost(seconds_per_step: float) -> Cost:
    """Return OMGS' model of top-k selection: x -> seconds_per_step * x * log2(x), x elements.

    Args:
        seconds_per_step: seconds per x * log2(x), at least 0.

    Returns:
        A function from the number of elements, or from an (n,) array of them, to seconds.

    Raises:
        InvalidArgumentError: ``seconds_per_step`` is negative or not finite.
    """
    expect_non_negative("selection_cost", seconds_per_step=seconds_per_step)

    def seconds(elements: Any) -> Any:
        return seconds_per_step * elements * np.log2(np.maximum(elements, 1))

    return seconds


def finish_with_selection(
    ready: npt.ArrayLike,
    elements: npt.ArrayLike,
    grouping: Iterable[int],
    selection: Cost,
    cost: Cost,
) -> float:
    """Return the time when the last message ends if each group is selected as one tensor.

    The device that computes backward also selects. So the selection of a group starts when its last
    gradient is computed, and backward continues after it.

    Args:
        ready, elements, selection, cost: as for :func:`optimal_merge_with_selection`.
        grouping: the lengths of the groups, L in total.

    Returns:
        The time in seconds, from the start of backward.

    Raises:
        InvalidArgumentError: the lengths of the groups do not add up to L, the arrays do not have
            these shapes, or a number is negative or not finite.
    """
    at, amounts = checked("finish_with_selection", ready, elements)
    selected, finish, first = 0.0, 0.0, 0
    for length in checked_grouping("finish_with_selection grouping", grouping, at.size):
        last = first + length
        total = amounts[first:last].sum()
        selected += cost_of("finish_with_selection selection", selection, total)
        seconds = cost_of("finish_with_selection cost", cost, total)
        finish = max(finish, float(at[last - 1]) + selected) + seconds
        first = last
    return finish


def optimal_merge_with_selection(
    ready: npt.ArrayLike, elements: npt.ArrayLike, selection: Cost, cost: Cost
) -> Grouping:
    """Return the grouping whose last message ends first, if each group is selected as one tensor.

    Selecting larger groups delays backward, so the seconds of backward depend on the grouping. For
    every prefix of the gradients, the program keeps the pairs (end of computing, end of sending)
    that are Pareto-optimal. It is exact for every cost.

    Args:
        ready: (L,) ascending seconds at which the gradients would be ready without any selection.
        elements: (L,) sizes, in the unit of the two functions.
        selection: a function from the size of a group to the seconds of its selection.
        cost: a function from the size of a group to the seconds of its message. Both functions may
            accept arrays, see :func:`optimal_merge`.

    Returns:
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, a number is negative or not
            finite, or the cost is infinite for every grouping.
    """
    at, amounts = checked("optimal_merge_with_selection", ready, elements)
    selection_of = on_arrays("optimal_merge_with_selection selection", selection, amounts)
    cost_of = on_arrays("optimal_merge_with_selection cost", cost, amounts)
    prefix = np.concatenate([amounts[:0], [0], np.cumsum(amounts)]).astype(amounts.dtype)

    def advance(
        start: IndexArray, selected: FloatArray, finish: FloatArray, end: int
    ) -> list[tuple[FloatArray, FloatArray]]:
        # per start, not per state: the costs may be slow functions
        total = prefix[end] - prefix[:end]
        after = selected + selection_of(total)[start]
        return [(after, np.maximum(finish, at[end - 1] + after) + cost_of(total)[start])]

    paths = pareto_paths(at.size, advance)
    best = min(paths, key=lambda path: path[2])
    expect_allowed("optimal_merge_with_selection", best[2])
    return [length for length, _ in best[0]], best[2]


#: (start, first clock, second clock, end) -> per way of sending, both clocks after the group
Advance = Callable[
    [IndexArray, FloatArray, FloatArray, int], Sequence[tuple[FloatArray, FloatArray]]
]


def pareto_paths(
    count: int, advance: Advance, limit: int | None = None
) -> list[tuple[list[tuple[int, int]], float, float]]:
    """Return all groupings that are Pareto-optimal in the two clocks.

    Both clocks after a group must not decrease when a clock before it grows. Of paths with equal
    clocks, the one whose last group is longest is kept, then the one with the first way.

    Args:
        count: the number of gradients.
        advance: a function from states and the end of a group to the clocks after this group. A
            state is the start of the group and two clocks; states are arrays of equal length. It
            returns one pair of arrays per way in which the group can travel.
        limit: the largest number of states to keep per prefix, at least 2. If there are more, they
            are thinned out evenly, and the result may miss the best path. None keeps all.

    Returns:
        A list of (path, first clock, second clock), with the first clock ascending. A path is a
        list of (length of the group, number of its way).
    """
    first = [np.zeros(1)]
    second = [np.zeros(1)]
    # of each state: the boundary and the state that it comes from, and the way of its last group
    parents: list[list[npt.NDArray[Any]]] = [[np.zeros(1, dtype=np.intp)] * 3]
    for end in range(1, count + 1):
        lengths = [clocks.size for clocks in first]
        start = np.repeat(np.arange(end), lengths)
        within = np.concatenate([np.arange(length) for length in lengths])
        ways = advance(start, np.concatenate(first), np.concatenate(second), end)
        way = np.tile(np.arange(len(ways)), start.size)
        one = np.stack([pair[0] for pair in ways], axis=1).reshape(-1)
        two = np.stack([pair[1] for pair in ways], axis=1).reshape(-1)
        order = np.lexsort((two, one))  # stable: of equal states the first remains
        best_before = np.concatenate([[np.inf], np.minimum.accumulate(two[order])[:-1]])
        kept = order[two[order] < best_before]
        if not kept.size:
            kept = order[:1]
        if limit is not None and kept.size > limit:
            kept = kept[np.linspace(0, kept.size - 1, limit).round().astype(np.intp)]
        first.append(one[kept])
        second.append(two[kept])
        origin = kept // len(ways)
        parents.append([start[origin], within[origin], way[kept]])
    paths = []
    for number in range(first[-1].size):
        path, end, state = [], count, number
        while end:
            start_of, within_of, way_of = parents[end]
            begin = int(start_of[state])
            path.append((end - begin, int(way_of[state])))
            end, state = begin, int(within_of[state])
        paths.append((path[::-1], float(first[-1][number]), float(second[-1][number])))
    return paths
