"""The published rules that decide which gradients share a message, for comparison.

Groupings and arguments are those of :mod:`deepreduce_hvd.schedule.merge`.
"""

import math

import numpy.typing as npt

from deepreduce_hvd.schedule.grouping import Cost, Grouping, checked, cost_of, expect_non_negative
from deepreduce_hvd.schedule.merge import finish_seconds, finish_with_selection


def wfbp(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping of wait-free backpropagation: one message per gradient.

    Args:
        ready, sizes, cost: as for :func:`finish_seconds`.

    Returns:
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: as for :func:`finish_seconds`.
    """
    at, _ = checked("wfbp", ready, sizes)
    grouping = [1] * at.size
    return grouping, finish_seconds(ready, sizes, grouping, cost)


def single_message(ready: npt.ArrayLike, sizes: npt.ArrayLike, cost: Cost) -> Grouping:
    """Return the grouping of SyncEASGD: one message for all gradients, after backward.

    Args:
        ready, sizes, cost: as for :func:`finish_seconds`.

    Returns:
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: as for :func:`finish_seconds`.
    """
    at, _ = checked("single_message", ready, sizes)
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
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, or a number is negative or not
            finite.

    >>> mg_wfbp([0, 9, 18], [5, 0, 0], alpha=10, beta=1)
    ([3], 33.0)
    """
    expect_non_negative("mg_wfbp", alpha=alpha, beta=beta)
    at, amounts = checked("mg_wfbp", ready, sizes)
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


def omgs(ready: npt.ArrayLike, elements: npt.ArrayLike, selection: Cost, cost: Cost) -> Grouping:
    """Return the grouping of OMGS' greedy rule, with its two mistakes corrected.

    A group is merged with the next gradient if the delay of its message is less than what one
    message saves. The published delay subtracts the selection of the next gradient a second time;
    here it is subtracted once. The published loop starts one gradient late, so that the first two
    always share a message; here it starts with the first. Source: OMGS-SGD (Shi et al. 2020).

    The published costs are ``selection_cost(s)`` and
    ``lambda x: 2 * (a + 4 * b * ranks * density * x)``.

    Args:
        ready, elements, selection, cost: as for :func:`optimal_merge_with_selection`.

    Returns:
        A tuple (grouping, time in seconds when the last message ends).

    Raises:
        InvalidArgumentError: the arrays do not have these shapes, or a number is negative or not
            finite.
    """
    at, amounts = checked("omgs", ready, elements)
    grouping: list[int] = []
    length, total, selected, finish = 0, 0.0, 0.0, 0.0
    for layer in range(at.size):
        length, total = length + 1, total + float(amounts[layer])
        computed = float(at[layer]) + selected
        own_selection = cost_of("omgs selection", selection, total)
        own_cost = cost_of("omgs cost", cost, total)
        starts = max(finish, computed + own_selection)
        if layer + 1 < at.size:
            following = float(amounts[layer + 1])
            together = total + following
            backward = float(at[layer + 1] - at[layer])
            delay = computed + backward + cost_of("omgs selection", selection, together) - starts
            saved = (
                own_cost
                + cost_of("omgs cost", cost, following)
                - cost_of("omgs cost", cost, together)
            )
            if delay < saved:
                continue
        grouping.append(length)
        selected, finish = selected + own_selection, starts + own_cost
        length, total = 0, 0.0
    return grouping, finish_with_selection(ready, elements, grouping, selection, cost)
