"""Which gradients share a message: exact programs, and the published greedy rules for comparison.

Gradients are numbered in the order in which backward makes them ready, from 0. A grouping is the
list of the lengths of consecutive groups: ``[2, 1]`` is one message for the first two gradients and
one for the third. A message starts when its last gradient is ready and the message before it has
ended.

All functions of this module return ``(grouping, finish)``, where ``finish`` is the second at which
the last message ends. Time 0 is the start of backward.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepreduce_hvd.errors import InvalidArgumentError

#: Bytes or elements -> seconds. See :func:`optimal_merge` for the calls with arrays.
Cost = Callable[[Any], Any]
Grouping = tuple[list[int], float]
FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]


def finish_seconds(
    ready: npt.ArrayLike, sizes: npt.ArrayLike, grouping: Sequence[int], cost: Cost
) -> float:
    """Return the second at which the last message of a grouping ends.

    Args:
        ready: (L,) ascending seconds at which the gradients are ready.
        sizes: (L,) bytes.
        grouping: the lengths of the groups, L in total.
        cost: a function from bytes to seconds.

    Returns:
        The second, counted from the start of backward.

    Raises:
        InvalidArgumentError: the lengths of the groups do not add up to L, the arrays do not have
            these shapes, or a number is negative or not finite.

    >>> finish_seconds([0, 9, 18], [5, 0, 0], [1, 2], lambda size: 10 + size)
    28.0
    """
    at, amounts = _checked("finish_seconds", ready, sizes)
    if sum(grouping) != at.size or any(length < 1 for length in grouping):
        raise InvalidArgumentError(
            "finish_seconds grouping: expected lengths of at least 1 that add up to "
            f"{at.size}, got {list(grouping)}"
        )
    finish, first = 0.0, 0
    for length in grouping:
        last = first + length
        seconds = _cost_of("finish_seconds", cost, amounts[first:last].sum())
        finish = max(finish, float(at[last - 1])) + seconds
        first = last
    return finish


def optimal_merge(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping whose last message ends first.

    The dynamic program is F(0) = 0, F(j) = min over i < j of max(F(i), ready(j)) + cost(bytes of i
    to j). It is exact for every cost, because each gradient is selected and encoded on its own, so
    a payload does not depend on the grouping. The cost need not grow with the bytes.

    Of equally good groupings, the last message contains as many gradients as possible. The same
    holds for the gradients before it. Every prefix of the result is optimal for its gradients.

    Args:
        ready: (L,) ascending seconds at which the gradients are ready for sending.
        sizes: (L,) bytes.
        cost: a function from bytes to seconds, at least 0. Infinity forbids a message. It is called
            with an (n,) array if that gives the same results as calls with one number each, else
            with one number each. With arrays, 500 gradients need milliseconds. With numbers, the
            L (L + 1) / 2 calls take most of the time.

    Returns:
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, a number is negative or not
            finite, or the cost is infinite for every grouping.

    >>> optimal_merge([0, 9, 18], [5, 0, 0], lambda size: 10 + size)
    ([1, 2], 28.0)
    """
    at, amounts = _checked("optimal_merge", ready, sizes)
    seconds_of = _on_arrays("optimal_merge", cost, amounts)
    count = at.size
    prefix = np.concatenate([amounts[:0], [0], np.cumsum(amounts)]).astype(amounts.dtype)
    finish = np.zeros(count + 1)
    start = np.zeros(count + 1, dtype=np.intp)
    for end in range(1, count + 1):
        ends = np.maximum(finish[:end], at[end - 1]) + seconds_of(prefix[end] - prefix[:end])
        start[end] = np.argmin(ends)  # the first of equal ones
        finish[end] = ends[start[end]]
    _expect_allowed("optimal_merge", float(finish[-1]))
    grouping, end = [], count
    while end:
        grouping.append(int(end - start[end]))
        end = int(start[end])
    return grouping[::-1], float(finish[-1])


def wfbp(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping of wait-free backpropagation: one message per gradient.

    Args:
        ready, sizes, cost: as of :func:`finish_seconds`.

    Returns:
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: as of :func:`finish_seconds`.
    """
    at, _ = _checked("wfbp", ready, sizes)
    grouping = [1] * at.size
    return grouping, finish_seconds(ready, sizes, grouping, cost)


def single_message(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping of SyncEASGD: one message for all gradients, after backward.

    Args:
        ready, sizes, cost: as of :func:`finish_seconds`.

    Returns:
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: as of :func:`finish_seconds`.
    """
    at, _ = _checked("single_message", ready, sizes)
    grouping = [at.size] if at.size else []
    return grouping, finish_seconds(ready, sizes, grouping, cost)


def mg_wfbp(ready: npt.ArrayLike, sizes: npt.ArrayLike, alpha: float, beta: float) -> Grouping:
    """Return the grouping of MG-WFBP's greedy rule, for the cost ``alpha + beta * bytes``.

    A message is merged into the next one if the next gradient is ready before the message would
    end, and less than ``alpha`` after it would start. The rule is not optimal: it looks at two
    messages at a time. Source: MG-WFBP (Shi et al. 2019), algorithm 1.

    Args:
        ready: (L,) ascending seconds at which the gradients are ready.
        sizes: (L,) bytes.
        alpha: seconds per message.
        beta: seconds per byte.

    Returns:
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, or a number is negative or not
            finite.

    >>> mg_wfbp([0, 9, 18], [5, 0, 0], alpha=10, beta=1)
    ([3], 33.0)
    """
    _expect_non_negative("mg_wfbp", alpha=alpha, beta=beta)
    at, amounts = _checked("mg_wfbp", ready, sizes)
    grouping: list[int] = []
    length, size, free = 0, 0.0, 0.0  # of the current message; time at which the network is free
    for layer in range(at.size):
        length, size = length + 1, size + float(amounts[layer])
        starts = max(free, float(at[layer]))
        ends = starts + alpha + beta * size
        following = float(at[layer + 1]) if layer + 1 < at.size else math.inf
        if not (following < ends and following - starts < alpha):
            grouping.append(length)
            length, size, free = 0, 0.0, ends
    return grouping, finish_seconds(ready, sizes, grouping, lambda total: alpha + beta * total)


def selection_cost(seconds_per_step: float) -> Cost:
    """Return OMGS' model of top-k selection: x -> seconds_per_step * x * log2(x), x elements.

    Args:
        seconds_per_step: seconds per x * log2(x), at least 0.

    Returns:
        A function from the number of elements, or from an (n,) array of them, to seconds.

    Raises:
        InvalidArgumentError: ``seconds_per_step`` is negative or not finite.
    """
    _expect_non_negative("selection_cost", seconds_per_step=seconds_per_step)

    def seconds(elements: Any) -> Any:
        return seconds_per_step * elements * np.log2(np.maximum(elements, 1))

    return seconds


def finish_with_selection(
    ready: npt.ArrayLike,
    elements: npt.ArrayLike,
    grouping: Sequence[int],
    selection: Cost,
    cost: Cost,
) -> float:
    """Return the second at which the last message ends if each group is selected as one tensor.

    The device that computes backward also selects. So the selection of a group starts when its last
    gradient is computed, and backward continues after it.

    Args:
        ready, elements, selection, cost: as of :func:`optimal_merge_with_selection`.
        grouping: the lengths of the groups, L in total.

    Returns:
        The second, counted from the start of backward.

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, or a number is negative or not
            finite.
    """
    at, amounts = _checked("finish_with_selection", ready, elements)
    selected, finish, first = 0.0, 0.0, 0
    for length in grouping:
        last = first + length
        total = amounts[first:last].sum()
        selected += _cost_of("finish_with_selection selection", selection, total)
        seconds = _cost_of("finish_with_selection cost", cost, total)
        finish = max(finish, float(at[last - 1]) + selected) + seconds
        first = last
    return finish


def omgs(ready: npt.ArrayLike, elements: npt.ArrayLike, selection: Cost, cost: Cost) -> Grouping:
    """Return the grouping of OMGS' greedy rule, with its two mistakes corrected.

    A group is merged with the next gradient if the delay of its message is less than what one
    message saves. The published delay subtracts the selection of the next gradient a second time;
    here it is subtracted once. The published loop starts one gradient late, so that the first two
    always share a message; here it starts with the first. Source: OMGS-SGD (Shi et al. 2020).

    The published costs are ``selection_cost(s)`` and
    ``lambda x: 2 * (a + 4 * b * ranks * density * x)``.

    Args:
        ready, elements, selection, cost: as of :func:`optimal_merge_with_selection`.

    Returns:
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, or a number is negative or not
            finite.
    """
    at, amounts = _checked("omgs", ready, elements)
    grouping: list[int] = []
    length, total, selected, finish = 0, 0.0, 0.0, 0.0
    for layer in range(at.size):
        length, total = length + 1, total + float(amounts[layer])
        computed = float(at[layer]) + selected
        own_selection = _cost_of("omgs selection", selection, total)
        own_cost = _cost_of("omgs cost", cost, total)
        starts = max(finish, computed + own_selection)
        if layer + 1 < at.size:
            following = float(amounts[layer + 1])
            together = total + following
            backward = float(at[layer + 1] - at[layer])
            delay = computed + backward + _cost_of("omgs selection", selection, together) - starts
            saved = (
                own_cost
                + _cost_of("omgs cost", cost, following)
                - _cost_of("omgs cost", cost, together)
            )
            if delay < saved:
                continue
        grouping.append(length)
        selected, finish = selected + own_selection, starts + own_cost
        length, total = 0, 0.0
    return grouping, finish_with_selection(ready, elements, grouping, selection, cost)


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
        A tuple (grouping, second at which the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, a number is negative or not
            finite, or the cost is infinite for every grouping.
    """
    at, amounts = _checked("optimal_merge_with_selection", ready, elements)
    selection_of = _on_arrays("optimal_merge_with_selection selection", selection, amounts)
    cost_of = _on_arrays("optimal_merge_with_selection cost", cost, amounts)
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
    _expect_allowed("optimal_merge_with_selection", best[2])
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


def _checked(
    name: str, ready: npt.ArrayLike, sizes: npt.ArrayLike
) -> tuple[FloatArray, npt.NDArray[Any]]:
    """Return both arguments as arrays; sizes stay integers if they are integers."""
    try:
        at = np.asarray(ready, dtype=np.float64)
        amounts = np.asarray(sizes)
        amounts = amounts.astype(np.int64 if amounts.dtype.kind in "iub" else np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name}: expected (L,) arrays of numbers for ready and sizes, got {error}"
        ) from error
    if at.ndim != 1 or at.shape != amounts.shape:
        raise InvalidArgumentError(
            f"{name}: expected two arrays of shape (L,), got {at.shape} and {amounts.shape}"
        )
    for what, values in (("ready", at), ("sizes", amounts)):
        if not np.isfinite(values).all() or (values < 0).any():
            raise InvalidArgumentError(
                f"{name} {what}: expected finite numbers of at least 0, got {values.tolist()}"
            )
    if (np.diff(at) < 0).any():
        raise InvalidArgumentError(
            f"{name} ready: expected ascending seconds, got {at.tolist()}; "
            "order the gradients as backward makes them ready"
        )
    return at, amounts


def _cost_of(name: str, cost: Cost, amount: Any) -> float:
    seconds = float(cost(amount.item() if isinstance(amount, np.generic) else amount))
    _expect_seconds(name, seconds)
    return seconds


def _on_arrays(
    name: str, cost: Cost, amounts: npt.NDArray[Any]
) -> Callable[[npt.NDArray[Any]], FloatArray]:
    """Return a function that applies ``cost`` to every element of an array."""

    def one_by_one(totals: npt.NDArray[Any]) -> FloatArray:
        return np.array([cost(total) for total in totals.tolist()], dtype=np.float64)

    def seconds_of(totals: npt.NDArray[Any]) -> FloatArray:
        seconds = np.asarray(cost(totals), np.float64) if on_arrays else one_by_one(totals)
        _expect_seconds(name, seconds)
        return seconds

    # at least two different numbers, so that a function of the whole array shows
    sample = np.unique(np.concatenate([amounts, [0, 1], [amounts.sum()]]).astype(amounts.dtype))
    try:
        together = np.asarray(cost(sample), dtype=np.float64)
    except Exception:  # such as `if size > 4096`, which works for numbers only
        together = np.zeros(0)
    on_arrays = together.shape == sample.shape and np.array_equal(together, one_by_one(sample))
    return seconds_of


def _expect_seconds(name: str, seconds: float | FloatArray) -> None:
    if np.isnan(seconds).any() or np.less(seconds, 0).any():
        raise InvalidArgumentError(f"{name}: expected a cost of at least 0 seconds, got {seconds}")


def _expect_allowed(name: str, finish: float) -> None:
    if math.isinf(finish):
        raise InvalidArgumentError(
            f"{name}: expected a cost that allows at least one grouping, got infinity for all"
        )


def _expect_non_negative(name: str, **values: float) -> None:
    for what, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgumentError(
                f"{name} {what}: expected a finite number of at least 0, got {value!r}"
            )
