"""FitPoly: piecewise polynomials through the sorted values (DeepReduce, section on Fit-Poly)."""

import math
import struct

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics import bits
from deepreduce_hvd.numerics.exact_math import lane_sum
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import expect_empty, unpack_header
from deepreduce_hvd.stages.value_codecs.fit_sides import restored, sort_sides, to_values

MAX_DEGREE = 7
MAX_SEGMENTS = 1024
# number of positives, segments per side, exponent per side, degree, width of lengths
_HEADER = struct.Struct("<IHHhhBB")
_EXPONENTS = (-152, 160)
_MAX_WIDTH = 32


def choose_segments(y, degree):
    """Return the number of segments for the magnitudes ``y`` (n,), given largest first.

    The number is p = ceil(2 sqrt(M)), within bounds. In the paper, M = abs((y1 - y2) - (y[n-1] -
    y[n])) depends on the unit of the values. Here M is in units of the mean gap, so scaling a
    gradient does not change the number of segments.

    A single outlier can make M almost as large as n. Two bounds limit the cost of that case: at
    most sqrt(n) segments, and on average at least four values per coefficient.
    """
    n = y.size
    most = min(math.floor(math.sqrt(n)), n // (4 * (degree + 1)), MAX_SEGMENTS)
    if most < 2 or y[0] <= y[-1]:  # values that were not sorted to the last bit may even increase
        return 1
    mean_gap = (y[0] - y[-1]) / (n - 1)
    m = abs((y[0] - y[1]) - (y[-2] - y[-1])) / mean_gap
    return max(1, min(math.ceil(2 * math.sqrt(m)), most))


def _farthest(y, start, end, fewest):
    """Return (distance, position) of the point of ``y[start:end]`` farthest from the chord.

    Only points that leave at least ``fewest`` points on either side are considered.
    """
    if end - start < 2 * fewest:
        return 0.0, start
    slope = (y[end - 1] - y[start]) / (end - 1 - start)
    offsets = np.arange(fewest, end - start - fewest + 1)
    distances = np.abs(y[start + fewest : end - fewest + 1] - (y[start] + slope * offsets))
    best = int(np.argmax(distances))
    return float(distances[best]), start + fewest + best


def find_segments(y, wanted, degree):
    """Cut ``y`` (n,) into at most ``wanted`` segments by the chord rule.

    Each new knot is the point farthest from the chord of its segment, among the points that leave
    at least degree + 1 points on either side. The search ends if there is no such point or if all
    of them are on their chords. Of equally distant points, the first point of the first segment is
    taken.

    Returns:
        A list of (start, end), ascending.
    """
    segments = [(0, y.size, *_farthest(y, 0, y.size, degree + 1))]
    while len(segments) < wanted:
        widest = max(range(len(segments)), key=lambda i: segments[i][2])
        start, end, distance, knot = segments[widest]
        if distance == 0.0:
            break
        segments[widest : widest + 1] = [
            (start, knot, *_farthest(y, start, knot, degree + 1)),
            (knot, end, *_farthest(y, knot, end, degree + 1)),
        ]
    return [(start, end) for start, end, _, _ in segments]


def _recurrence(n, degree):
    """Return the recurrence of the monic Gram polynomials on n equally spaced points.

    Returns:
        A tuple ([0, beta_1, …, beta_degree], [squared norms of P_0, …, P_degree]).
    """
    betas, norms = [0.0], [float(n)]
    for j in range(1, degree + 1):
        square = float(j * j)
        betas.append(square * (1.0 - square / (float(n) * float(n))) / (4.0 * square - 1.0))
        norms.append(norms[-1] * betas[j])
    return betas, norms


def _points(n):
    return (2.0 * np.arange(n) - (n - 1)) * (1.0 / n)


def fit_segment(y, degree):
    """Fit a polynomial to ``y`` (n,) by least squares, in the orthonormal Gram basis.

    The basis is orthogonal on exactly these points. Each coefficient is therefore a dot product,
    and the fit cannot be ill-conditioned.

    Returns:
        (degree + 1,) coefficients; those of degrees above n - 1 are 0.
    """
    usable = min(degree, y.size - 1)
    x = _points(y.size)
    betas, norms = _recurrence(y.size, usable)
    basis = [np.ones(y.size), x]
    for j in range(1, usable):
        basis.append(x * basis[j] - betas[j] * basis[j - 1])
    result = np.zeros(degree + 1)
    result[: usable + 1] = lane_sum(np.stack(basis[: usable + 1]) * y) / np.sqrt(norms)
    return result


def evaluate(coefficients, n):
    """Evaluate the polynomial with orthonormal ``coefficients`` at its n points.

    It is converted to powers of x and evaluated by Horner's rule.

    Returns:
        (n,) float64.
    """
    usable = min(len(coefficients) - 1, n - 1)
    betas, norms = _recurrence(n, usable)
    before, now, powers = np.zeros(usable + 1), np.eye(1, usable + 1)[0], np.zeros(usable + 1)
    for j in range(usable + 1):
        powers = powers + coefficients[j] / np.sqrt(norms[j]) * now
        before, now = now, np.concatenate([[0.0], now[:-1]]) - betas[j] * before
    x = _points(n)
    value = np.full(n, powers[usable])
    for power in powers[usable - 1 :: -1] if usable else ():
        value = value * x + power
    return value


def _half_exponent(x):
    """Return floor(log2(sqrt(x))) for x > 0."""
    return (math.frexp(x)[1] - 1) // 2


def _quantize(fits, squares):
    """Quantize the coefficients of one side.

    The basis is orthonormal, so rounding N coefficients to multiples of s adds at most N s^2 / 4 to
    the squared error E. With s^2 <= 0.008 E / N, the error (the root of E) is within 0.1 % of the
    best one. A step of 2^-26 of the norm is smaller than the rounding error of float32, so s is at
    least that.

    Args:
        fits: (p, degree + 1), the coefficients of p segments.
        squares: (p,), the sum of squares of the values of each segment.

    Returns:
        A tuple (exponent, (p, degree + 1) int64 multiples of 2^exponent).
    """
    total, fitted = 0.0, 0.0
    for square in squares:
        total += float(square)
    for coefficient in fits.ravel().tolist():
        fitted += coefficient * coefficient
    if total == 0.0:
        return 0, np.zeros(fits.shape, dtype=np.int64)
    exponent = max(_half_exponent(total) - 26, _EXPONENTS[0])
    rest = 0.008 * (total - fitted) / fits.size
    if rest > 0.0:
        exponent = max(exponent, _half_exponent(rest))
    return exponent, np.rint(np.ldexp(fits, -exponent)).astype(np.int64)


def _signed_width(column):
    """Return the width of a two's complement field that can hold all of ``column``, in bits.

    The width is 0 if all numbers are 0.
    """
    largest = max((int(q) if q >= 0 else ~int(q) for q in column), default=0)
    return largest.bit_length() + 1 if np.any(column) else 0


def _signed(fields, widths):
    """Convert two's complement fields to int64.

    Args:
        fields: (p, degree + 1).
        widths: (degree + 1,), the width of each column in bits.
    """
    sign = (1 << widths) >> 1
    return (fields ^ sign) - sign


@register
class FitPoly(ValueCodec):
    """Value codec that fits piecewise polynomials to the values sorted by magnitude.

    Positive and negative values are fitted separately, by least squares. The order of the values
    has to be sent too. With an index codec that accepts any order (:class:`RawIndex`), the indices
    follow the order of the values. Other index codecs need an order mapping of ceil(log2 k) bits
    per value. Source: Fit-Poly in DeepReduce (Xu et al., NeurIPS 2021).

    Args:
        degree: the degree of the polynomials, from 1 to 7.
        segments: the number of segments for each sign, from 1 to 1024. None chooses it from the
            values (:func:`choose_segments`).

    Raises:
        InvalidArgumentError: an argument is not an integer in its range.

    >>> values = np.linspace(1, 3, 40, dtype=np.float32)
    >>> section, decoded, order = FitPoly(degree=1).encode(values, key=0)
    >>> len(section), bool(np.abs(decoded - values).max() < 1e-6), order[:3].tolist()
    (23, True, [39, 38, 37])
    """

    stage_id = 6
    sorts = True

    def __init__(self, degree: int = 5, segments: int | None = None) -> None:
        self.degree = expect_integer(
            "FitPoly degree",
            degree,
            f"an integer of 1 to {MAX_DEGREE}",
            lambda n: 1 <= n <= MAX_DEGREE,
        )
        if segments is not None:
            segments = expect_integer(
                "FitPoly segments",
                segments,
                f"an integer of 1 to {MAX_SEGMENTS}",
                lambda n: 1 <= n <= MAX_SEGMENTS,
            )
        self.segments = segments

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.degree, self.segments or 0)

    def bits_per_value(self) -> float:
        # the position of a value in the order mapping; the size of the curves hardly changes
        return 16.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        order, sides = sort_sides(values)
        if values.size == 0:
            return b"", values, order
        lengths, quantized, exponents, counts = [], [], [], []
        for y in sides:
            wanted = (self.segments or choose_segments(y, self.degree)) if y.size else 0
            segments = find_segments(y, wanted, self.degree) if y.size else []
            fits = np.array([fit_segment(y[a:b], self.degree) for a, b in segments]).reshape(
                -1, self.degree + 1
            )
            exponent, q = _quantize(fits, [lane_sum(y[a:b] * y[a:b]) for a, b in segments])
            lengths += [b - a for a, b in segments[:-1]]
            quantized.append(q)
            exponents.append(exponent)
            counts.append(len(segments))
        q = np.concatenate(quantized)
        length_width = max(lengths, default=0).bit_length()
        widths = [_signed_width(column) for column in q.T]
        fields = np.concatenate(
            [np.array(lengths, dtype=np.int64), (q & ((1 << np.array(widths)) - 1)).ravel()]
        )
        section = _HEADER.pack(sides[0].size, *counts, *exponents, self.degree, length_width)
        section += bytes(widths) + bits.pack_varied(
            fields, [length_width] * len(lengths) + widths * len(q)
        )
        return section, restored(self.decode(section, values.size), order), order

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        if count == 0:
            expect_empty(section, "value")
            return np.zeros(0, dtype=np.float32)
        positives, *parts, degree, length_width = unpack_header(_HEADER, section, "value")
        segments, exponents = parts[:2], parts[2:]
        if positives > count:
            raise CorruptPayloadError(
                f"value section: expected at most {count} positive values, got {positives}"
            )
        if not 1 <= degree <= MAX_DEGREE:
            raise CorruptPayloadError(
                f"value section: expected a degree of 1 to {MAX_DEGREE}, got {degree}"
            )
        sides = (positives, count - positives)
        for n, p, exponent in zip(sides, segments, exponents):
            fewest, most = min(n, 1), min(n, MAX_SEGMENTS)
            if not fewest <= p <= most:
                raise CorruptPayloadError(
                    f"value section: expected {fewest} to {most} segments for {n} values, got {p}"
                )
            lowest, highest = _EXPONENTS if n else (0, 0)
            if not lowest <= exponent <= highest:
                raise CorruptPayloadError(
                    f"value section: expected an exponent of {lowest} to {highest} for {n} "
                    f"values, got {exponent}"
                )
        start = _HEADER.size + degree + 1
        widths = list(section[_HEADER.size : start])
        if len(widths) != degree + 1 or max(*widths, length_width) > _MAX_WIDTH:
            raise CorruptPayloadError(
                f"value section: expected {degree + 2} widths of at most {_MAX_WIDTH} "
                f"bits, got {[length_width, *widths]}"
            )
        knots = sum(p - 1 for p in segments if p)
        fields = bits.unpack_varied(
            section[start:], [length_width] * knots + widths * sum(segments), "value section"
        )
        lengths, rows = (
            iter(fields[:knots].tolist()),
            iter(_signed(fields[knots:].reshape(-1, degree + 1), np.array(widths))),
        )
        pieces = []
        for n, p, exponent, sign in zip(sides, segments, exponents, (1, -1)):
            rest = n
            for i in range(p):
                length = rest if i == p - 1 else next(lengths)
                if length < 1 or (i < p - 1 and length >= rest):
                    raise CorruptPayloadError(
                        f"value section: expected segments that fill {n} values, got one "
                        f"of {length} with {rest} left"
                    )
                rest -= length
                q = next(rows)
                if q[length:].any():
                    raise CorruptPayloadError(
                        f"value section: expected coefficients of 0 above degree {length - 1}, "
                        f"got {q[length:].tolist()}"
                    )
                pieces.append(
                    to_values(evaluate(np.ldexp(q.astype(np.float64), exponent), length), sign)
                )
        return np.concatenate(pieces)
