"""What the curve fits share: both signs apart, each sorted by magnitude (the oracle of
csrc/value/fit_sides.cc).
"""

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


def sort_sides(values):
    """``values`` (k,) float32 -> (order (k,) uint32, (positive, negative) magnitudes float64, each
    largest first).

    The sign bit decides the side (-0.0 is negative); equal values keep their positions' order. A
    curve does not care about the order of neighbours, so up to five last bits (2^-18 of a value)
    are ignored as far as that leaves 22 bits to sort by.

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
    """Fitted ``magnitudes`` (n,) float64 -> float32 of ``sign``, never across zero, never infinite."""
    clamped = np.where(magnitudes > 0, magnitudes, 0.0)
    clamped = np.where(clamped < _LARGEST, clamped, _LARGEST)
    return clamped.astype(np.float32) * np.float32(sign)


def restored(sent, order):
    """``sent`` (k,) in the order sent -> at their own positions."""
    decoded = np.empty_like(sent)
    decoded[order] = sent
    return decoded
