"""Lloyd-Max quantization: the sign and one of a few levels fitted to the tensor's magnitudes."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics.bits import pack_fields, unpack_fields
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register

_MOST_BITS = 4
#: Magnitudes are counted in bins. A bin has all float32 numbers with the same exponent and the same
#: first five bits of the significand. The bins cover the 16 octaves up to the largest magnitude;
#: smaller magnitudes count as zero.
_BINS = 512
_BIN_SHIFT = 18  # bits of the significand within a bin
_ITERATIONS = 8
#: number of levels from which zeros stay zeros; with fewer, a level for them would cost too much
_LEVELS_FOR_ZERO = 4
#: relative error with 1 to 4 bits for exponentially distributed magnitudes, from the mean squared
#: errors of Lloyd-Max quantizers for a Laplace distribution (Adams and Giesler 1978)
_RELATIVE_ERRORS = (0.7071, 0.4198, 0.2334, 0.1242)


def _moments(magnitudes):
    """Return counts and sums of the magnitudes in each bin.

    Args:
        magnitudes: (n,) uint32, bits of float32 numbers that are not negative; n is at least 1.

    Returns:
        The number of the first bin, the number of magnitudes below it, the counts (512,) int64, the
        sums (512,) float64, which are exact sums rounded once, and the widths of the bins (512,)
        float64.
    """
    numbers = magnitudes >> np.uint32(_BIN_SHIFT)
    first = max(int(numbers.max()) - (_BINS - 1), 0)
    inside = numbers >= first
    places = (numbers[inside] - np.uint32(first)).astype(np.int64)
    counts = np.bincount(places, minlength=_BINS)
    within = np.zeros(_BINS, dtype=np.uint64)
    np.add.at(
        within, places, (magnitudes[inside] & np.uint32((1 << _BIN_SHIFT) - 1)).astype(np.uint64)
    )
    # in units of the last place: exact integers below 2^56
    bins = np.arange(first, first + _BINS)
    exponents = bins >> 5
    starts = ((bins & 31) + np.where(exponents > 0, 32, 0)) << _BIN_SHIFT
    units = counts.astype(np.uint64) * starts.astype(np.uint64) + within
    scales = np.ldexp(1.0, np.maximum(exponents, 1) - 150)
    below = magnitudes.size - int(counts.sum())
    return first, below, counts, units.astype(np.float64) * scales, scales * (1 << _BIN_SHIFT)


def _levels(magnitudes, number):
    """Fit levels to magnitudes by Lloyd's method.

    The initial ranges have equal integrals of the square root of the density, which is close to the
    cube root, the asymptotic optimum. Each later step assigns each bin to the level nearest to the
    mean of the bin. A level then becomes the mean of its magnitudes. A level without magnitudes
    keeps its value, or takes that of the level below if that is larger. With four levels or more,
    the lowest one is 0 if some magnitudes are 0.

    Args:
        magnitudes: (n,) uint32, bits of float32 numbers that are not negative; n is at least 1.
        number: number of levels.

    Returns:
        Ascending levels, (number,) float32, and the thresholds between them, (number - 1,) uint32:
        a magnitude has level i if its bits reach i of the thresholds.
    """
    first, below, counts, sums, widths = _moments(magnitudes)
    counted = np.concatenate([[below], below + np.cumsum(counts)])
    summed = np.concatenate([[0.0], np.cumsum(sums)])  # one after another
    edges = (np.arange(first, first + _BINS, dtype=np.uint32) << np.uint32(_BIN_SHIFT)).view("<f4")
    means = np.where(counts > 0, sums / np.maximum(counts, 1), edges.astype(np.float64))
    roots = np.concatenate([[0.0], np.cumsum(np.sqrt(counts * widths))])
    boundaries = np.searchsorted(roots * number, roots[-1] * np.arange(1, number), side="left")
    levels = np.zeros(number)
    has_zeros = number >= _LEVELS_FOR_ZERO and not magnitudes.all()
    for iteration in range(_ITERATIONS):
        if iteration > 0:
            middles = (levels[:-1] + levels[1:]) / 2
            boundaries = np.searchsorted(means, middles, side="left")
        if has_zeros and first == 0:  # zeros may be in bin 0
            boundaries = np.maximum(boundaries, 1)
        ends = np.concatenate([[0], boundaries, [_BINS]])
        for i in range(1 if has_zeros else 0, number):
            count = counted[ends[i + 1]] - (counted[ends[i]] if i > 0 else 0)
            if count > 0:
                levels[i] = (summed[ends[i + 1]] - summed[ends[i]]) / count
            if i > 0:
                levels[i] = max(levels[i], levels[i - 1])
    thresholds = (boundaries + first) << _BIN_SHIFT
    return levels.astype(np.float32), thresholds.astype(np.uint32)


@register
class LloydMax(ValueCodec):
    """Value codec with a few levels fitted to each tensor (Lloyd 1982; Max 1960).

    One bit is the sign. The other bits select one of 2^(bits-1) magnitudes, the levels. They are
    fitted with eight steps of Lloyd's method. With ``bits=1`` the mean squared error is the
    smallest possible. With more bits it is close to that for normal or Laplace values, but with
    heavy tails it can be several times as large. If magnitudes form distant clusters,
    more bits may gain nothing. With ``bits=1`` a value becomes its sign times the mean magnitude,
    as in EF-SignSGD (Karimireddy et al. 2019). With three or four bits, zeros stay zeros: then the
    lowest level is 0. Nothing is random, and the error is always smaller than the values, so a
    memory can keep it with any number of bits.

    The largest 1 % of a gradient have similar magnitudes. Few levels are enough for them.

    Args:
        bits: bits per value, from 1 to 4.

    Raises:
        InvalidArgumentError: ``bits`` is not an integer of 1 to 4.

    >>> LloydMax(bits=2).encode(np.array([-2, 5, 2, -5], dtype=np.float32), key=0)[1]
    array([-2.,  5.,  2., -5.], dtype=float32)
    """

    stage_id = 9

    def __init__(self, bits: int = 2) -> None:
        self.bits = expect_integer(
            "LloydMax bits",
            bits,
            f"an integer of 1 to {_MOST_BITS}",
            lambda n: 1 <= n <= _MOST_BITS,
        )

    @property
    def sends_zeros(self) -> bool:
        return self.bits > 1

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.bits,)

    def bits_per_value(self) -> float:
        return float(self.bits)

    def relative_error(self) -> float:
        return _RELATIVE_ERRORS[self.bits - 1]

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        if values.size == 0:
            return b"", np.zeros(0, dtype=np.float32), None
        patterns = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        magnitudes = patterns & np.uint32(0x7FFFFFFF)
        levels, thresholds = _levels(magnitudes, 1 << (self.bits - 1))
        numbers = np.searchsorted(thresholds, magnitudes, side="right")
        negative = patterns >> np.uint32(31)
        decoded = np.where(negative == 1, -levels[numbers], levels[numbers]).astype(np.float32)
        codes = numbers | (negative << np.uint32(self.bits - 1))
        section = bytes([self.bits]) + levels.astype("<f4").tobytes()
        return section + pack_fields(codes, self.bits), decoded, None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        if count == 0:
            if section:
                raise CorruptPayloadError(f"value section: expected 0 bytes, got {len(section)}")
            return np.zeros(0, dtype=np.float32)
        bits = section[0] if section else 0
        if not 1 <= bits <= _MOST_BITS:
            raise CorruptPayloadError(
                f"value section: expected 1 to {_MOST_BITS} bits per value, got {bits}"
            )
        number = 1 << (bits - 1)
        expected = 1 + 4 * number + (count * bits + 7) // 8
        if len(section) != expected:
            raise CorruptPayloadError(
                f"value section: expected {expected} bytes, got {len(section)}"
            )
        levels = np.frombuffer(section, dtype="<f4", count=number, offset=1)
        if (
            not np.isfinite(levels).all()
            or np.signbit(levels).any()
            or (levels[1:] < levels[:-1]).any()
        ):
            raise CorruptPayloadError(
                "value section: expected finite levels of at least 0, in ascending order, got "
                f"{levels.tolist()}"
            )
        codes = unpack_fields(section[1 + 4 * number :], count, bits, "value section")
        return np.concatenate([levels, -levels])[codes].astype(np.float32)
