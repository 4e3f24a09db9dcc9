"""MomentumCorrection: error feedback of the velocity."""

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.settings import is_number
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class MomentumCorrection(Memory):
    """Deep Gradient Compression's memory (Lin et al. 2018, section 3.2): momentum is applied before
    what is not sent gathers.

    velocity = momentum * velocity + gradient; residual = residual + velocity; what is selected
    comes from the residual. Where an element was sent, the residual loses what the payload decodes
    to and the velocity becomes 0 (momentum factor masking). The optimizer itself then runs with
    momentum 0. ``momentum`` in [0, 1).
    """

    stage_id = 3
    state = ("residual", "velocity")

    def __init__(self, momentum: float = 0.9) -> None:
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise InvalidArgumentError(
                f"MomentumCorrection momentum: expected a number in [0, 1), got {momentum!r}"
            )
        self.momentum = momentum

    def parameters(self, step=0):
        return (self.momentum,)

    def accumulate(self, gradient, state):
        velocity = saturated_sum(np.float32(self.momentum) * state[1], gradient)
        accumulated = saturated_sum(state[0], velocity)
        return accumulated, (accumulated, velocity)

    def update(self, gradient, accumulated, state, indices, decoded):
        residual, velocity = accumulated.copy(), state[1].copy()
        residual[indices] = saturated_difference(residual[indices], decoded)
        velocity[indices] = 0
        return residual, velocity

    def put_back(self, state, indices, values):
        state[0][indices] = saturated_sum(state[0][indices], values)
