"""NoMemory: discard the part that was not sent."""

from deepreduce_hvd.stages.base import Memory


class NoMemory(Memory):
    """Memory that keeps nothing.

    Biased sparsifiers such as :class:`TopK` lose accuracy without a memory. NoMemory is the
    baseline in experiments.
    """

    stage_id = 0

    def accumulate(self, gradient, state):
        return gradient, ()

    def update(self, gradient, accumulated, state, indices, decoded):
        return ()

    def put_back(self, state, indices, values):
        pass
