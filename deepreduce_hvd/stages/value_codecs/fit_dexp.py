"""FitDExp: one double exponential for each sign (DeepReduce, section on Fit-DExp)."""

import math
import struct

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics import exact_math
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.value_codecs.fit_sides import restored, sort_sides, to_values

_SECTION = struct.Struct("<I8f")  # number of positives; a, b, c, d per side
_LOWEST, _HIGHEST = -700.0, 600.0  # range of exponents: two float32 times e^600 are still finite
_LOWEST_RATE, _HIGHEST_RATE = -1e6, 300.0  # range of b and d: sums of squares stay finite too
_LARGEST = float(np.finfo(np.float32).max)


def solve(matrix, right):
    """Solve ``matrix`` x = ``right`` by Gaussian elimination with partial pivoting.

    The arguments are lists of Python floats.

    Returns:
        x as a list of floats, or None if the matrix is singular.
    """
    rows = [[*row, value] for row, value in zip(matrix, right)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if not abs(rows[column][column]) > 1e-300:
            return None
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            for j in range(column, size + 1):
                rows[i][j] = rows[i][j] - factor * rows[column][j]
    result = [0.0] * size
    for i in range(size - 1, -1, -1):
        value = rows[i][size]
        for j in range(i + 1, size):
            value = value - rows[i][j] * result[j]
        result[i] = value / rows[i][i]
    return result if all(math.isfinite(value) for value in result) else None


def _regress(columns, y):
    """Fit ``y`` (n,) by least squares on ``columns``, a list of (n,) arrays.

    The normal equations are used.

    Returns:
        The coefficients as a list of floats, or None if the system is singular.
    """
    size = len(columns)
    matrix = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            matrix[i][j] = matrix[j][i] = float(exact_math.lane_sum(columns[i] * columns[j]))
    return solve(matrix, [float(exact_math.lane_sum(column * y)) for column in columns])


def _points(n):
    """Return n equally spaced points from 0 to 1."""
    return np.arange(n) * (1.0 / (n - 1) if n > 1 else 0.0)


def _integral(y, step):
    """Return the cumulative trapezoid integral of ``y`` (n,), summed in order."""
    areas = np.zeros(y.size)
    areas[1:] = (y[1:] + y[:-1]) * (0.5 * step)
    return np.add.accumulate(areas)


def evaluate(coefficients, n):
    """Evaluate a e^(b x) + c e^(d x) at n points of [0, 1].

    Exponents are limited to the range from -700 to 600.

    Args:
        coefficients: (a, b, c, d).
        n: the number of points.

    Returns:
        (n,) float64.
    """
    a, b, c, d = (float(value) for value in coefficients)
    x = _points(n)

    def term(factor, rate):
        exponents = rate * x
        exponents = np.where(exponents > _LOWEST, exponents, _LOWEST)
        return factor * exact_math.exp(np.where(exponents < _HIGHEST, exponents, _HIGHEST))

    return term(a, b) + term(c, d)


def _with_factors(rates, z):
    """Return the coefficients of the exponentials with the given rates.

    The factors a and c are fitted by least squares to ``z`` (n,).

    Args:
        rates: (b,) or (b, d).
        z: (n,) float64, scaled magnitudes.

    Returns:
        [a, b, c, d] as float32, or None if there is no usable fit.
    """
    if not all(_LOWEST_RATE <= rate <= _HIGHEST_RATE for rate in rates):
        return None
    rates = [float(np.float32(rate)) for rate in rates]
    factors = _regress([evaluate((1.0, rate, 0.0, 0.0), z.size) for rate in rates], z)
    if factors is None or max(map(abs, factors)) > _LARGEST:
        return None
    a, b, c, d = [value for pair in [*zip(factors, rates), (0.0, 0.0)][:2] for value in pair]
    return np.array([a, b, c, d], dtype=np.float32)


def fit_side(y):
    """Return the best double exponential for the magnitudes ``y`` (n,), given largest first.

    Let S and SS be the first and second integrals of y. Then y = A SS + B S + C x + D is linear in
    its coefficients, and b and d are the roots of t^2 - B t - A (Jacquelin's integral equations).
    The factors a and c follow by least squares.

    A single exponential (y = B S + D) and a constant are fitted as well. If the roots are complex,
    the system is singular or there are too few points, one of them is used: the fit is then less
    accurate but still valid. The fit with the smallest squared error wins; of equal ones, the
    simplest.

    Returns:
        The numbers a, b, c, d as (4,) float32, always finite.
    """
    if y.size == 0:
        return np.zeros(4, dtype=np.float32)
    # scaling by a power of two is exact; it prevents overflow and underflow of sums of squares
    exponent = math.frexp(float(y[0]))[1]
    z = np.ldexp(y, -exponent)
    step = 1.0 / (y.size - 1) if y.size > 1 else 0.0
    x, ones = _points(y.size), np.ones(y.size)
    first = _integral(z, step)
    rates: list[tuple[float, ...]] = [(0.0,)]
    single = _regress([first, ones], z)
    if single is not None:
        rates.append((single[0],))
    double = _regress([_integral(first, step), x, first, ones], z) if y.size >= 4 else None
    if double is not None:
        discriminant = double[2] * double[2] + 4.0 * double[0]
        if discriminant > 0.0:
            root = math.sqrt(discriminant)
            rates.append((0.5 * (double[2] + root), 0.5 * (double[2] - root)))
    best, least = np.zeros(4, dtype=np.float32), math.inf
    for candidate in rates:
        coefficients = _with_factors(candidate, z)
        if coefficients is None:
            continue
        difference = evaluate(coefficients, z.size) - z
        error = float(exact_math.lane_sum(difference * difference))
        if error < least:
            best, least = coefficients, error
    best[[0, 2]] = np.clip(np.ldexp(best.astype(np.float64)[[0, 2]], exponent), -_LARGEST, _LARGEST)
    return best


@register
class FitDExp(ValueCodec):
    """Value codec that fits y = a e^(b x) + c e^(d x) to the values sorted by magnitude.

    Positive and negative values are fitted separately. A section has 36 bytes, for any number of
    values. The order of the values is sent as with :class:`FitPoly`. Sources: Fit-DExp in
    DeepReduce (Xu et al., NeurIPS 2021); J. Jacquelin, Régressions et équations intégrales (2009).

    >>> values = np.float32(3) * np.exp(-np.arange(50, dtype=np.float32) / 10)
    >>> section, decoded, order = FitDExp().encode(values, key=0)
    >>> len(section), bool(np.abs(decoded - values).max() < 0.01)
    (36, True)
    """

    stage_id = 7
    sorts = True

    def bits_per_value(self) -> float:
        """Return 16, an estimate for the position of a value in the order mapping.

        One more value adds nothing to the size of the curve.
        """
        return 16.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        order, sides = sort_sides(values)
        if values.size == 0:
            return b"", values, order
        section = _SECTION.pack(
            sides[0].size, *np.concatenate([fit_side(y) for y in sides]).tolist()
        )
        return section, restored(self.decode(section, values.size), order), order

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        expected = _SECTION.size if count else 0
        if len(section) != expected:
            raise CorruptPayloadError(
                f"value section: expected {expected} bytes, got {len(section)}"
            )
        if count == 0:
            return np.zeros(0, dtype=np.float32)
        positives, *coefficients = _SECTION.unpack(section)
        if positives > count:
            raise CorruptPayloadError(
                f"value section: expected at most {count} positive values, got {positives}"
            )
        if not np.isfinite(coefficients).all():
            raise CorruptPayloadError(
                f"value section: expected finite coefficients, got {coefficients}"
            )
        pieces = []
        for n, sign, start in ((positives, 1, 0), (count - positives, -1, 4)):
            if n == 0 and any(section[4 + 4 * start : 20 + 4 * start]):
                raise CorruptPayloadError(
                    "value section: expected coefficients of 0 for a sign without values, got "
                    f"{coefficients[start : start + 4]}"
                )
            pieces.append(to_values(evaluate(coefficients[start : start + 4], n), sign))
        return np.concatenate(pieces)
