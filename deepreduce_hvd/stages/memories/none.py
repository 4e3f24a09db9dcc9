"""NoMemory: what was not sent is forgotten."""

from deepreduce_hvd.stages.base import Memory


class NoMemory(Memory):
    """Keeps nothing.

    Biased sparsifiers such as TopK lose accuracy with it; it is the control of experiments.
    """

    stage_id = 0

    def accumulate(self, gradient, state):
        return gradient, ()

    def update(self, gradient, accumulated, state, indices, decoded):
        return ()

    def put_back(self, state, indices, values):
        pass
