"""Gradients between compress and decompress."""

import time

import torch

from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.torch import results


class Pending:
    """One gradient between compress and decompress.

    Attributes:
        slot: slot of its parameter.
        gradient: the tensor that Horovod gave to compress.
        made: whether backward made the gradient.
        way: how its gradient is sent, as in :class:`~deepreduce_hvd.planning.policies.Policy`.
        optimizer_step: its :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerStep`.
        kept: the :class:`~deepreduce_hvd.torch.references.Kept` tensor that Horovod reduces.
        flight: its :class:`~deepreduce_hvd.torch.optimizer_steps.Flight`, or None if it is not
            compressed.
    """

    def __init__(self, slot, gradient, made, step, kept, flight=None):
        self.slot = slot
        self.gradient = gradient
        self.made = made
        self.way = slot.policy.way  # the next step may have another one
        self.optimizer_step = step
        self.kept = kept
        self.flight = flight

    def memory_for_result(self, reduced):
        """Return the tensor for the sum.

        Horovod reduces in place only for its optimizers, which expect the sum in the gradient's
        memory.
        """
        in_place = reduced is self.kept.tensors[0]
        return results.memory_for(self.gradient, self.slot.parameter, self.made, in_place)


def as_reduced(gradient, way):
    """Return the tensor of an uncompressed gradient that Horovod reduces.

    Horovod's allreduce needs contiguous tensors and has no bfloat16 on the host.
    """
    if way == FP16:
        gradient = gradient.half()
    elif gradient.dtype == torch.bfloat16:
        gradient = gradient.float()
    return gradient.contiguous()


def time_fp16(count, device):
    """Return the seconds of converting ``count`` elements to float16, and of converting back."""
    gradient = torch.zeros(count, device=device)
    started = time.perf_counter()
    reduced = as_reduced(gradient, FP16)
    between = time.perf_counter()
    gradient.copy_(reduced)
    if not reduced.is_cuda:
        results.is_finite(reduced)
    return between - started, time.perf_counter() - between
