"""Functions that return the same bits on every machine (csrc/support/exact_math.h).

They use only basic IEEE operations, in a fixed order.
"""

import numpy as np

LANES = 8
# 1.5 * 2^52: adding it rounds to an integer and leaves this integer in the low bits
_MAGIC = 6755399441055744.0
_LOG2E = 1.4426950408889634
# the high part of ln 2 has 32 significant bits, so its products with small integers are exact
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_RECIPROCAL_FACTORIALS = [
    1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0,
    1 / 5040.0,
    1 / 720.0, 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0,
]  # fmt: skip
#: the bits of a float32 number without its sign, and those of the smallest normal number
_MAGNITUDE, _SMALLEST_NORMAL = np.uint32(0x7FFFFFFF), np.uint32(0x00800000)


def is_nonzero(values):
    """Return which float32 numbers are not zero, as an array of bool.

    Threads of frameworks may treat denormal numbers as zeros, which changes ``values != 0``. So
    this compares bits.

    >>> is_nonzero(np.array([0.0, -0.0, 1e-45], dtype=np.float32)).tolist()
    [False, False, True]
    """
    return values.view(np.uint32) & _MAGNITUDE != 0


def divided(values, divisor):
    """Return float32 numbers divided by an integer, also on threads that flush denormal numbers.

    Where such a thread would lose a small number, this divides its bits, which count 2^-149.

    Args:
        values: (n,) float32.
        divisor: an integer in [1, 2^24], a float32 number too.

    Returns:
        (n,) float32, the numbers nearest to the exact quotients.

    >>> divided(np.array([3.0, 4.2e-45, -1e-45], dtype=np.float32), 2).view(np.uint32).tolist()
    [1069547520, 2, 2147483648]
    """
    quotients = values / np.float32(divisor)
    magnitudes = values.view(np.uint32) & _MAGNITUDE
    # quotients below 2^-125 are whole multiples of 2^-149, and their bits are these multiples
    (small,) = np.nonzero(magnitudes < np.float32(divisor * 2.0**-125).view(np.uint32))
    if small.size:
        few, bits = values[small], magnitudes[small]
        denormal = bits < _SMALLEST_NORMAL
        multiples = np.where(denormal, bits, np.abs(few).astype(np.float64) * 2.0**149)
        quotients.view(np.uint32)[small] = (
            np.rint(multiples / divisor).astype(np.uint32) | few.view(np.uint32) & ~_MAGNITUDE
        )
    return quotients


def exp(x):
    """Return e^x for (n,) float64 with abs(x) <= 700, within 2 units in the last place.

    x is split into n ln 2 + r with abs(r) <= ln 2 / 2. The Taylor polynomial of degree 13 in r is
    evaluated by Horner's rule and multiplied by 2^n.

    >>> float(exp(np.array([0.0]))[0])
    1.0
    """
    shifted = x * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = np.full(x.shape, _RECIPROCAL_FACTORIALS[0])
    for coefficient in _RECIPROCAL_FACTORIALS[1:]:
        value = value * r + coefficient
    power = (shifted.view(np.int64) + 1023) << 52
    return value * power.view(np.float64)


def lane_sum(terms):
    """Sum ``terms`` (..., n) float64 over the last axis, in the order of eight SIMD lanes.

    Lane l adds the terms l, l + 8, l + 16, … in this order. Then lanes l and l + 4, lanes l and l +
    2, and lanes l and l + 1 are added.

    >>> float(lane_sum(np.arange(10.0)))
    45.0
    """
    n = terms.shape[-1]
    rows = -(-n // LANES)
    padded = np.zeros((*terms.shape[:-1], rows * LANES))
    padded[..., :n] = terms
    # NumPy sums pairwise along the innermost axis only; along an outer axis it adds row after row
    lanes = np.add.reduce(padded.reshape(*terms.shape[:-1], rows, LANES), axis=-2)
    lanes = lanes[..., :4] + lanes[..., 4:]
    lanes = lanes[..., :2] + lanes[..., 2:]
    return lanes[..., 0] + lanes[..., 1]
