"""Sums and differences of float32 arrays that saturate at the largest finite number."""

import numpy as np


def saturated_sum(a, b):
    """Return ``a + b`` for (d,) float32 arrays.

    A sum that overflows becomes the largest finite float32 number of the same sign.
    """
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        return np.clip(a + b, -largest, largest)


def saturated_mean(arrays, ratio):
    """Return ``ratio`` times the sum of a list of (d,) float32 arrays, saturated and rounded once.

    If that is a single array unchanged, the array itself is returned.
    """
    if len(arrays) == 1 and ratio == 1:
        return arrays[0]
    total = np.zeros(arrays[0].shape, dtype=np.float64)
    for array in arrays:
        total += array
    total *= ratio
    largest = np.finfo(np.float32).max
    return np.clip(total, -largest, largest).astype(np.float32)


def saturated_difference(a, b):
    """Return ``a - b`` for (d,) float32 arrays, saturated in the same way as :func:`saturated_sum`.

    A lossy codec can decode a huge value to one of the other sign, so a difference can overflow
    too.
    """
    return saturated_sum(a, -b)
