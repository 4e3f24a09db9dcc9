"""NoMemory: discard the part that was not sent."""

import numpy as np

from deepreduce_hvd.stages.base import Arrays, Memory


class NoMemory(Memory):
    """Memory that keeps nothing.

    Biased sparsifiers such as :class:`TopK` lose accuracy without a memory. NoMemory is the
    baseline in experiments.
    """

    stage_id = 0

    def accumulate(self, gradient: np.ndarray, state: Arrays) -> tuple[np.ndarray, Arrays]:
        return gradient, ()

    def update(
        self,
        gradient: np.ndarray,
        accumulated: np.ndarray,
        state: Arrays,
        indices: np.ndarray,
        decoded: np.ndarray,
    ) -> Arrays:
        return ()

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        pass
