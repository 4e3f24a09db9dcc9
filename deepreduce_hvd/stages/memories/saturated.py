"""Sums and differences of float32 that stop at the largest finite number."""

import numpy as np


def saturated_sum(a, b):
    """``a + b`` of (d,) float32 arrays; a sum beyond float32 is its largest finite number of that
    sign.
    """
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        return np.clip(a + b, -largest, largest)


def saturated_difference(a, b):
    """``a - b`` in the same way: a lossy codec may decode a huge value to one of the other sign."""
    return saturated_sum(a, -b)
