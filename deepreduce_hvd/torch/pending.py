"""Gradients between compress and decompress."""

import time

import torch

from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.torch import results
from deepreduce_hvd.torch.with_residual import add_residual


class Pending:
    """One gradient between compress and decompress.

    Attributes:
        slot: slot of its parameter.
        gradient: the tensor that Horovod gave to compress.
        made: whether backward made the gradient.
        may_overflow: whether its sum needs a look, because it is a sum of float16 or took a
            residual along.
        optimizer_step: its :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerStep`.
        kept: the :class:`~deepreduce_hvd.torch.references.Kept` tensor that Horovod reduces.
        flight: its :class:`~deepreduce_hvd.torch.optimizer_buckets.Flight`, or None if it is not
            compressed.
    """

    def __init__(self, slot, gradient, made, step, kept, flight=None):
        self.slot = slot
        self.gradient = gradient
        self.made = made
        # the next step may send it in another way
        self.may_overflow = slot.policy.way == FP16 or (slot.dense and slot.changes)
        self.optimizer_step = step
        self.kept = kept
        self.flight = flight
        self._version = _version_of(gradient)
        #: address of the gradient if it is the parameter's ``.grad``, otherwise None
        self._address = None
        if step.owned and (own := _address_of(slot.parameter.grad)) == _address_of(gradient):
            self._address = own

    def has_changed(self):
        """Return whether the program has written to the gradient since compress, or replaced it."""
        if _version_of(self.gradient) != self._version:
            return True
        now = None if self._address is None else _address_of(self.slot.parameter.grad)
        return now is not None and now != self._address

    def memory_for_result(self, reduced):
        """Return the tensor for the sum.

        Horovod reduces in place only for its optimizers, which expect the sum in the gradient's
        memory.
        """
        in_place = reduced is self.kept.tensors[0]
        return results.memory_for(self.gradient, self.slot.parameter, self.made, in_place)


def _version_of(tensor):
    """Return how often PyTorch has written to the memory of a tensor, or None if it is unknown.

    PyTorch counts the writes to all views of a buffer together, so it is unknown for views.
    """
    return None if tensor.is_inference() or tensor._is_view() else tensor._version


def _address_of(tensor):
    """Return the address of a dense tensor's memory, or None."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tensor.data_ptr()


def changed_warning(slot):
    """Return the warning about a gradient that has changed while it was exchanged."""
    return (
        f"the gradient of {slot.name} was changed while it was exchanged, and the change may be"
        " lost, on some ranks or for some parameters. Call optimizer.synchronize() before"
        " clip_grad_norm_, scaler.unscale_ or anything else that changes gradients, and then step()"
        " in `with optimizer.skip_synchronize():` (docs/tutorial-torch.md, Gradient clipping)"
    )


def reduced_dtype(dtype, way):
    """Return the dtype in which Horovod reduces an uncompressed gradient of ``dtype``.

    Horovod's allreduce has no bfloat16 on the host.
    """
    if way == FP16:
        return torch.float16
    return torch.float32 if dtype == torch.bfloat16 else dtype


def as_reduced(gradient, way):
    """Return the tensor of an uncompressed gradient that Horovod reduces.

    Horovod's allreduce needs contiguous tensors.
    """
    return gradient.to(reduced_dtype(gradient.dtype, way)).contiguous()


def time_fp16(count, device):
    """Return the seconds of converting ``count`` elements to float16, and of converting back.

    Converting includes the residual, which takes most of the time.
    """
    gradient, residual = torch.zeros(2, count, device=device)
    started = time.perf_counter()
    reduced, _ = add_residual(gradient, residual, torch.float16, 2, True)
    between = time.perf_counter()
    gradient.copy_(reduced)
    if not reduced.is_cuda:
        results.is_finite(reduced)
    return between - started, time.perf_counter() - between
