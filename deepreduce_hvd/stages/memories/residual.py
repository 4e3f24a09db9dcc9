"""Residual: error feedback."""

import numpy as np

from deepreduce_hvd.stages.base import Arrays, Memory
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class Residual(Memory):
    """Memory for error feedback (Karimireddy et al. 2019).

    The residual is what the payloads so far have not carried. It is added to the next gradient. It
    includes all losses: elements that were not selected, rounding, curve fits and errors of Bloom
    filters.
    """

    stage_id = 1
    state = ("residual",)
    keeps_everything = True

    def accumulate(self, gradient: np.ndarray, state: Arrays) -> tuple[np.ndarray, Arrays]:
        accumulated = saturated_sum(state[0], gradient)
        return accumulated, (accumulated,)

    def update(
        self,
        gradient: np.ndarray,
        accumulated: np.ndarray,
        state: Arrays,
        indices: np.ndarray,
        decoded: np.ndarray,
    ) -> Arrays:
        residual = accumulated.copy()
        residual[indices] = saturated_difference(residual[indices], decoded)
        return (residual,)

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        state[0][indices] = saturated_sum(state[0][indices], values)
