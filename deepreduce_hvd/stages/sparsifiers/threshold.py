"""Threshold: keep the elements above a fixed magnitude."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_float
from deepreduce_hvd.stages.base import Sparsifier


class Threshold(Sparsifier):
    """Sparsifier that keeps the elements of magnitude greater than ``threshold`` (Strom 2015).

    Args:
        threshold: a finite number of at least 0, rounded to float32. With 0, every non-zero element
            is kept. A gradient that is already sparse, such as that of an embedding, is then sent
            without loss.

    Raises:
        InvalidArgumentError: ``threshold`` is negative, not finite or not a number.

    >>> Threshold(0.5).select(np.array([0.5, -0.75, 0, 1], dtype=np.float32), key=0)
    array([1, 3], dtype=uint32)
    """

    stage_id = 3
    example_arguments = "0.01"

    def __init__(self, threshold: float) -> None:
        largest = float(np.finfo(np.float32).max)
        self.threshold = expect_float(
            "Threshold", threshold, "a finite float32 of at least 0", lambda t: 0 <= t <= largest
        )

    @property
    def keeps_all(self) -> bool:
        """Whether every non-zero element is kept."""
        return self.threshold == 0

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.threshold,)

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        return np.flatnonzero(np.abs(accumulated) > np.float32(self.threshold)).astype(np.uint32)
