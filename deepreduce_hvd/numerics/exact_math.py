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


def is_nonzero(values):
    """Return which float32 numbers are not zero, as an array of bool.

    Threads of frameworks may treat denormal numbers as zeros, which changes ``values != 0``. So
    this compares bits.

    >>> is_nonzero(np.array([0.0, -0.0, 1e-45], dtype=np.float32)).tolist()
    [False, False, True]
    """
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF) != 0


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
