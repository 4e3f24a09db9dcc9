"""The part that the curve-fitting codecs share: separate the signs and sort by magnitude.

The tests compare csrc/value/fit_sides.cc with this file.
"""

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


def sort_sides(values):
    """Separate values by sign and sort each side by magnitude, largest first.

    The sign bit selects the side, so -0.0 is negative. Equal values keep the order of their
    positions. The order of neighbors does not matter to a curve. Up to five low bits (2^-18 of a
    value, or 31 * 2^-149 if that is more) are therefore ignored, as long as 22 bits remain to sort
    by.

    Args:
        values: (k,) float32.

    Returns:
        A tuple (order, (positives, negatives)). ``order`` is (k,) uint32; the other two are the
        float64 magnitudes of each side.

    >>> order, sides = sort_sides(np.array([1, -2, 3, -4], dtype=np.float32))
    >>> order.tolist(), [side.tolist() for side in sides]
    ([2, 0, 3, 1], [[3.0, 1.0], [4.0, 2.0]])
    """
    keys = values.view(np.uint32) ^ np.uint32(0x7FFFFFFF)
    within = keys & np.uint32(0x7FFFFFFF)
    span = int(np.ptp(within)).bit_length() if keys.size else 0
    dropped = min(max(span + 1 - 22, 0), 5)
    compact = (
        (within - within.min(initial=0x7FFFFFFF)) | (keys >> np.uint32(31)) << np.uint32(span)
    ) >> np.uint32(dropped)
    order = np.argsort(compact, kind="stable").astype(np.uint32)
    magnitudes = np.abs(values[order]).astype(np.float64)
    positives = values.size - int(np.count_nonzero(np.signbit(values)))
    return order, (magnitudes[:positives], magnitudes[positives:])


def to_values(magnitudes, sign):
    """Convert fitted magnitudes to float32 values of ``sign``.

    A result never has the other sign and is never infinite.

    Args:
        magnitudes: (n,) float64.
        sign: 1 or -1.
    """
    clamped = np.where(magnitudes > 0, magnitudes, 0.0)
    clamped = np.where(clamped < _LARGEST, clamped, _LARGEST)
    return clamped.astype(np.float32) * np.float32(sign)


def restored(sent, order):
    """Return the values ``sent`` (k,), given in the order sent, at their original positions."""
    decoded = np.empty_like(sent)
    decoded[order] = sent
    return decoded
