"""What the programs and rules that group gradients share: types, and checks of their arguments."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from deepreduce_hvd.argument_checks import is_integer
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.fields import is_finite

#: Bytes or elements -> seconds. See :func:`optimal_merge` for the calls with arrays.
Cost = Callable[[Any], Any]
Grouping = tuple[list[int], float]
FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]


def checked(
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


def cost_of(name: str, cost: Cost, amount: Any) -> float:
    seconds = float(cost(amount.item() if isinstance(amount, np.generic) else amount))
    _expect_seconds(name, seconds)
    return seconds


def checked_grouping(name: str, grouping: Iterable[int], count: int) -> list[int]:
    """Return the lengths of groups as a list, if they are those of ``count`` gradients."""
    lengths = list(grouping)
    good = all(is_integer(length) and length >= 1 for length in lengths)
    if not good or sum(lengths) != count:
        raise InvalidArgumentError(
            f"{name}: expected lengths of at least 1 that add up to {count}, got {lengths}"
        )
    return [int(length) for length in lengths]


def on_arrays(
    name: str, cost: Cost, amounts: npt.NDArray[Any]
) -> Callable[[npt.NDArray[Any]], FloatArray]:
    """Return a function that applies ``cost`` to every element of an array."""

    def one_by_one(totals: npt.NDArray[Any]) -> FloatArray:
        return np.array([cost(total) for total in totals.tolist()], dtype=np.float64)

    def seconds_of(totals: npt.NDArray[Any]) -> FloatArray:
        seconds = np.asarray(cost(totals), np.float64) if accepts_arrays else one_by_one(totals)
        _expect_seconds(name, seconds)
        return seconds

    # at least two different numbers, to detect a function that is not element-wise
    sample = np.unique(np.concatenate([amounts, [0, 1], [amounts.sum()]]).astype(amounts.dtype))
    try:
        together = np.asarray(cost(sample), dtype=np.float64)
        accepts_arrays = np.array_equal(together, one_by_one(sample))
    except Exception:  # `if size > 4096` works for numbers only, and a cost may divide by the size
        accepts_arrays = False
    return seconds_of


def _expect_seconds(name: str, seconds: float | FloatArray) -> None:
    if np.isnan(seconds).any() or np.less(seconds, 0).any():
        raise InvalidArgumentError(f"{name}: expected a cost of at least 0 seconds, got {seconds}")


def expect_allowed(name: str, finish: float) -> None:
    if math.isinf(finish):
        raise InvalidArgumentError(
            f"{name}: expected a cost that allows at least one grouping, got infinity for all"
        )


def expect_non_negative(name: str, **values: float) -> None:
    for what, value in values.items():
        if not (is_finite(value) and value >= 0):
            raise InvalidArgumentError(
                f"{name} {what}: expected a finite number of at least 0, got {value!r}"
            )
