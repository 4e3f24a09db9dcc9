"""MomentumCorrection: error feedback of the velocity."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_float
from deepreduce_hvd.stages.base import Arrays, Memory
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class MomentumCorrection(Memory):
    """Memory of Deep Gradient Compression (Lin et al. 2018, section 3.2).

    Momentum is applied before the residual accumulates: first ``velocity = momentum * velocity +
    gradient``, then ``residual = residual + velocity``. The sparsifier selects from the residual.
    Where an element is sent, the decoded value is subtracted from the residual, and the velocity is
    set to 0 (momentum factor masking). If a communicator such as :class:`GTopK` drops a sent value,
    the value returns to the residual, and the velocity stays 0. Use an optimizer that
    :func:`deepreduce_hvd.prepare` has prepared. It may have momentum or not: prepare also adapts
    its weight decay.

    If a step has several backward passes, only the last one may synchronize gradients: use
    ``no_sync()`` or ``backward_passes_per_step``. A second pass that synchronizes would apply
    momentum to gradients that already contain it, so it raises an error.

    Args:
        momentum: a number in [0, 1).

    Raises:
        InvalidArgumentError: ``momentum`` is not a number in [0, 1), also as float32.
    """

    stage_id = 3
    state = ("residual", "velocity")
    needs_new_gradients = True  # the momentum of those in the average has been applied

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = expect_float(
            "MomentumCorrection momentum",
            momentum,
            "a float32 number in [0, 1)",
            lambda m: m >= 0 and bool(np.float32(m) < 1),
        )

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.momentum,)

    def accumulate(self, gradient: np.ndarray, state: Arrays) -> tuple[np.ndarray, Arrays]:
        velocity = saturated_sum(np.float32(self.momentum) * state[1], gradient)
        accumulated = saturated_sum(state[0], velocity)
        return accumulated, (accumulated, velocity)

    def update(
        self,
        gradient: np.ndarray,
        accumulated: np.ndarray,
        state: Arrays,
        indices: np.ndarray,
        decoded: np.ndarray,
    ) -> Arrays:
        residual, velocity = accumulated.copy(), state[1].copy()
        residual[indices] = saturated_difference(residual[indices], decoded)
        velocity[indices] = 0
        return residual, velocity

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        state[0][indices] = saturated_sum(state[0][indices], values)
