"""Custom stages that do the same as built-in ones. Their results must be equal bit for bit."""

import deepreduce_hvd as dr
from deepreduce_hvd.stages.memories.saturated import saturated_difference, saturated_sum


class OwnResidual(dr.Memory):
    """Residual as a custom memory, without an id and without native code."""

    state = ("kept",)

    def accumulate(self, gradient, state):
        accumulated = saturated_sum(state[0], gradient)
        return accumulated, (accumulated,)

    def update(self, gradient, accumulated, state, indices, decoded):
        kept = accumulated.copy()
        kept[indices] = saturated_difference(kept[indices], decoded)
        return (kept,)

    def put_back(self, state, indices, values):
        state[0][indices] = saturated_sum(state[0][indices], values)


class WithoutPutBack(dr.Memory):
    """OwnResidual without put_back, which all communicators except Allgather need."""

    state = ("kept",)
    accumulate = OwnResidual.accumulate
    update = OwnResidual.update


class Three(dr.Memory):
    """A memory with more arrays than any built-in one: the residual, and two counts."""

    state = ("kept", "steps", "sent")

    def accumulate(self, gradient, state):
        accumulated = saturated_sum(state[0], gradient)
        return accumulated, (accumulated, state[1] + 1, state[2])

    def update(self, gradient, accumulated, state, indices, decoded):
        sent = state[2].copy()
        sent[indices] += 1
        return (
            *OwnResidual.update(self, gradient, accumulated, state, indices, decoded),
            state[1],
            sent,
        )

    def put_back(self, state, indices, values):
        OwnResidual.put_back(self, state, indices, values)
