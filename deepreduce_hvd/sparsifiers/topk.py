"""TopK: the k elements of largest magnitude."""

import numpy as np

from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.stage import Sparsifier


class TopK(Sparsifier):
    """The ``k`` elements largest by (|value|, smaller index first), exactly; zeros are never sent.

    ``ratio`` in (0, 1] keeps max(1, floor(ratio * d)) elements (the paper's Top-r); ``k`` keeps that many.
    """

    wire_id = 1

    def __init__(self, ratio=None, k=None):
        if (ratio is None) == (k is None):
            raise InvalidArgument(f"TopK: expected one of ratio and k, got ratio={ratio!r} and k={k!r}")
        if ratio is not None and not 0 < ratio <= 1:
            raise InvalidArgument(f"TopK ratio: expected a number in (0, 1], got {ratio!r}")
        if k is not None and (int(k) != k or k < 1):
            raise InvalidArgument(f"TopK k: expected an integer of at least 1, got {k!r}")
        self.ratio = ratio
        self.k = k

    def parameters(self, step=0):
        return (self.ratio or 0.0, self.k or 0)

    def select(self, accumulated, key, step=0):
        d = accumulated.size
        ratio, k = self.parameters(step)
        k = int(min(max(k or np.floor(ratio * d), 1), d))
        candidates = np.flatnonzero(accumulated)
        # a stable sort keeps the smaller index first among equals
        largest = np.argsort(-np.abs(accumulated[candidates]), kind="stable")[:k]
        return np.sort(candidates[largest]).astype(np.uint32)
