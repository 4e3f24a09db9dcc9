"""Find the caller of a compression: the optimizer and the parameter of a gradient.

Horovod passes only a tensor to ``compress``. The parameter and the optimizer are arguments of the
calling method of Horovod's optimizer, so they are read from its frame. There is no other reliable
way: two gradients may be equal, a densified copy is no parameter's ``.grad``, and optimizers that
share a compressor take turns.
"""

import sys
import types
from typing import NamedTuple

import torch
from horovod.torch import mpi_ops, optimizer as horovod_optimizer

from deepreduce_hvd.validation import refuse_reducescatter


class Direct:
    """Owner of gradients without an optimizer, as with ``hvd.allreduce``."""


#: the only instance
DIRECT = Direct()
_HOST = torch.device("cpu")


class Caller(NamedTuple):
    """Information from the calling method.

    Attributes:
        owner: the optimizer, or :data:`DIRECT`.
        parameter: parameter of the gradient; None if unknown.
        alone: whether Horovod reduces this tensor alone; False if the call may reduce several
            tensors.
        process_set: process set over which Horovod reduces; None if unknown.
    """

    owner: object
    parameter: torch.Tensor | None
    alone: bool
    process_set: object

    def probe_device(self, gradient: torch.Tensor) -> torch.device:
        """Return the device for the probe of a gradient.

        The host reads the probe, so it belongs there. But if Horovod may reduce it together with
        gradients in one call, it must be on their device.
        """
        return _HOST if self.alone else gradient.device


# Frames are recognized by the addresses of their code: Python 3.12 hashes a code object by all its
# instructions, and several frames are looked at for each gradient.
_kept = []  # an address may be used again


def _addresses(functions):
    codes = [function.__code__ for function in functions]
    _kept.extend(codes)
    return frozenset(map(id, codes))


def _of_optimizers(*names):
    kinds = (horovod_optimizer._DistributedOptimizer, horovod_optimizer._DistributedAdasumOptimizer)
    return _addresses(vars(kind)[name] for kind in kinds for name in names if name in vars(kind))


_FUNCTIONS = _addresses([mpi_ops.allreduce, mpi_ops.grouped_allreduce])
_SCATTERING = _addresses([mpi_ops.reducescatter, mpi_ops.grouped_reducescatter])
_ALONE = _of_optimizers("_allreduce_grad_async")
_SYNCHRONIZE, _STEP = _of_optimizers("synchronize"), _of_optimizers("step")
_METHODS = _ALONE | _SYNCHRONIZE | _of_optimizers("_grouped_allreduce_grad_async")
_KNOWN = _METHODS | _FUNCTIONS | _SCATTERING


def current_caller():
    """Return the :class:`Caller` of the compression that runs in this thread.

    Raises:
        InvalidArgumentError: the caller is ``hvd.reducescatter``.
    """
    below = process_set = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = id(frame.f_code)
        if code in _KNOWN:
            if code in _METHODS:
                break
            if code in _SCATTERING:
                refuse_reducescatter()
            process_set = frame.f_locals["process_set"]
        below, frame = frame, frame.f_back
    if frame is None:
        return Caller(DIRECT, None, alone=False, process_set=process_set)
    arguments = frame.f_locals
    parameter = arguments.get("p")
    if parameter is None and below is not None:
        # before Python 3.12 a list comprehension, as in the method for groups, has its own frame
        parameter = below.f_locals.get("p")
    owner = arguments["self"]
    return Caller(owner, parameter, id(frame.f_code) in _ALONE, getattr(owner, "process_set", None))


def is_step_after_synchronize(owner):
    """Return whether ``step()`` of an optimizer of Horovod reduces gradients once more.

    It does after ``synchronize()``, without ``skip_synchronize()``.

    Args:
        owner: the optimizer, whose gradient is compressed.
    """
    if not getattr(owner, "_synchronized", False):
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _SYNCHRONIZE:
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and id(frame.f_back.f_code) in _STEP
