"""Measured seconds of a collective by bytes, and the line through them."""

import dataclasses
import functools
import math
import reprlib
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import is_number
from deepreduce_hvd.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Fit:
    """A line alpha + beta * bytes through measured seconds.

    Attributes:
        alpha: seconds at 0 bytes.
        beta: seconds per byte.
        error: the root mean square of (line - measured) / measured.
    """

    alpha: float
    beta: float
    error: float


def _is_pair(point: Any) -> bool:
    """Return whether a point is a pair of finite numbers."""
    if not isinstance(point, (tuple, list)) or len(point) != 2:
        return False
    return all(is_number(part) and math.isfinite(part) for part in point)


@dataclasses.dataclass(frozen=True)
class Table:
    """Measured seconds of a collective by bytes.

    Args:
        points: (bytes, seconds) pairs with the bytes ascending.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        pairs = self.points if isinstance(self.points, (tuple, list)) else ()
        good = len(pairs) >= 2 and all(_is_pair(point) for point in pairs)
        sizes = [size for size, _ in pairs] if good else []
        if not good or sizes != sorted(set(sizes)) or sizes[0] < 0:
            raise InvalidArgumentError(
                "table: expected at least 2 (bytes, seconds) pairs with ascending bytes, "
                f"got {reprlib.repr(self.points)}"
            )
        if min(seconds for _, seconds in self.points) <= 0:
            raise InvalidArgumentError(
                f"table: expected seconds above 0, got {reprlib.repr(self.points)}"
            )
        points = tuple((float(size), float(seconds)) for size, seconds in self.points)
        object.__setattr__(self, "points", points)  # so that integers from a file compare equal

    def seconds(self, size: Any) -> Any:
        """Return the seconds of a collective.

        The table is linear between its points. Above the last point it goes on with the slope of
        the fit. Below the first it is constant.

        Args:
            size: bytes, a number or an (n,) array.

        Returns:
            Seconds, in the shape of ``size``.
        """
        sizes, seconds = self._columns
        beyond = np.maximum(np.asarray(size, dtype=np.float64) - sizes[-1], 0.0)
        return np.interp(size, sizes, seconds) + beyond * self._fit.beta

    def largest(self, seconds: float) -> float:
        """Return the largest size that needs at most some seconds.

        Args:
            seconds: the seconds.

        Returns:
            Bytes. -1 if every size needs more, infinity if none does.
        """
        last_size, last = self.points[-1]
        if last <= seconds:
            beta = self._fit.beta
            return last_size + (seconds - last) / beta if beta > 0 else math.inf
        for (low, below), (high, above) in reversed(list(zip(self.points, self.points[1:]))):
            if below <= seconds:
                return low + (seconds - below) / (above - below) * (high - low)
        return -1.0

    def fit(self) -> Fit:
        """Return the line through the points.

        The seconds per byte are those of least squares of the error, which large messages decide.
        The seconds at 0 bytes are then those of least squares of the relative error, which small
        messages decide. Messages that take less than their bytes, because a link lets a burst
        pass, do not count there.

        Returns:
            A :class:`Fit` with alpha and beta of at least 0.
        """
        return self._fit

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        sizes, seconds = np.array(self.points).T
        return sizes, seconds

    @functools.cached_property
    def _fit(self) -> Fit:
        sizes, seconds = self._columns
        beta = max(float(np.polyfit(sizes, seconds, 1)[0]), 0.0)
        rest = seconds - beta * sizes
        weights = (rest > 0) / seconds**2
        alpha = float(np.average(rest, weights=weights)) if weights.any() else 0.0
        error = float(np.sqrt(np.mean(((alpha + beta * sizes) / seconds - 1) ** 2)))
        return Fit(alpha, beta, error)
