"""NoneSparsifier: send all elements."""

import numpy as np

from deepreduce_hvd.stages.base import Sparsifier


class NoneSparsifier(Sparsifier):
    """Sparsifier that keeps all ``d`` elements, including zeros.

    The payload then contains no indices.
    """

    stage_id = 0

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        return np.arange(accumulated.size, dtype=np.uint32)

    def most_selected(self, d: int, step: int = 0) -> int:
        return d
