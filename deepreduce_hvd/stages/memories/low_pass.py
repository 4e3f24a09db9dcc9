"""LowPass: error feedback through a low-pass filter."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_float
from deepreduce_hvd.stages.base import Arrays, Memory
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class LowPass(Memory):
    """Memory of ScaleCom: a residual behind a low-pass filter (Chen et al. 2020, algorithm 1).

    Let m be the residual, g the gradient, p = m + g, and s the decoded payload. The new residual is
    (1 - beta) m + beta (p - s). It is computed in float32 as p - (1 - beta) g - beta s, from left
    to right. So m = beta (sum of all g - sum of all s). Nothing is lost, but with ``beta`` less
    than 1, only a part of what was not sent competes for the next payload.

    Args:
        beta: a number in (0, 1]. 1 is plain error feedback; 0.1 to 0.3 is for large batches.

    Raises:
        InvalidArgumentError: ``beta`` is not a number in (0, 1], also as float32.
    """

    stage_id = 2
    state = ("residual",)

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = expect_float(
            "LowPass beta",
            beta,
            "a float32 number in (0, 1]",
            lambda beta: bool(0 < np.float32(beta) <= 1),
        )

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.beta,)

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
        beta = np.float32(self.beta)
        residual = accumulated.copy()
        if beta != 1:
            residual = saturated_difference(residual, (np.float32(1) - beta) * gradient)
        residual[indices] = saturated_difference(residual[indices], beta * decoded)
        return (residual,)

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        state[0][indices] = saturated_sum(state[0][indices], np.float32(self.beta) * values)
