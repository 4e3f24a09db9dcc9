"""Residual: error feedback."""

from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class Residual(Memory):
    """Adds what earlier payloads did not carry to the gradient, and keeps what this one does not
    (Karimireddy et al. 2019).

    The residual covers everything lost: elements not selected, rounding, fits and Bloom errors.
    """

    stage_id = 1
    state = ("residual",)
    keeps_everything = True

    def accumulate(self, gradient, state):
        accumulated = saturated_sum(state[0], gradient)
        return accumulated, (accumulated,)

    def update(self, gradient, accumulated, state, indices, decoded):
        residual = accumulated.copy()
        residual[indices] = saturated_difference(residual[indices], decoded)
        return (residual,)

    def put_back(self, state, indices, values):
        state[0][indices] = saturated_sum(state[0][indices], values)
