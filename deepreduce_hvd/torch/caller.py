"""Who calls a compression: Horovod hands it a tensor, and neither the parameter nor the optimizer
that the tensor belongs to.

Both are arguments of the method of Horovod's optimizer that calls, so they are read there. Nothing
else tells them apart for certain: two gradients may be equal, a densified copy is nobody's
``.grad``, and optimizers that share a compressor take turns.
"""

import sys
from typing import NamedTuple

import torch
from horovod.torch import mpi_ops, optimizer as horovod_optimizer


class Direct:
    """Stands for ``hvd.allreduce`` and the like, which belong to no optimizer."""


#: the one instance
DIRECT = Direct()


class Caller(NamedTuple):
    """What the calling method says.

    Attributes:
        owner: the optimizer, or :data:`DIRECT`.
        parameter: whose gradient it is; None when the caller does not say.
        alone: whether Horovod reduces what it gets by itself; False when it may be one of several
            tensors in a call.
        process_set: over which Horovod reduces; None when the caller does not say.
    """

    owner: object
    parameter: torch.Tensor | None
    alone: bool
    process_set: object


_FUNCTIONS = {mpi_ops.allreduce.__code__, mpi_ops.grouped_allreduce.__code__}


def _code_of(*names):
    kinds = (horovod_optimizer._DistributedOptimizer, horovod_optimizer._DistributedAdasumOptimizer)
    return {vars(kind)[name].__code__ for kind in kinds for name in names if name in vars(kind)}


_ALONE = _code_of("_allreduce_grad_async")
_METHODS = _ALONE | _code_of("_grouped_allreduce_grad_async", "synchronize")


def current_caller():
    """The :class:`Caller` of the compression that is at work in this thread."""
    below, frame, process_set = None, sys._getframe(1), None
    while frame is not None and frame.f_code not in _METHODS:
        if frame.f_code in _FUNCTIONS:
            process_set = frame.f_locals["process_set"]
        below, frame = frame, frame.f_back
    if frame is None:
        return Caller(DIRECT, None, alone=False, process_set=process_set)
    arguments = frame.f_locals
    # Before Python 3.12 a list comprehension, as in the method for groups, has a frame of its own.
    parameter = arguments["p"] if "p" in arguments else below.f_locals.get("p")
    owner = arguments["self"]
    return Caller(owner, parameter, frame.f_code in _ALONE, getattr(owner, "process_set", None))
