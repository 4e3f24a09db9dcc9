"""Waits of PyTorch programs for other ranks, found in their frames; error texts after failures."""

import functools

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops, optimizer as horovod_optimizer

from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.frames import Wait, frames_of
from deepreduce_hvd.coordination.launchers import is_elastic
from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.coordination.watch import watcher
from deepreduce_hvd.torch import unnamed
from deepreduce_hvd.torch.transport import HorovodTransport

_SYNCHRONIZE = mpi_ops.synchronize.__code__
_JOIN = mpi_ops.join.__code__
_AGREE = handshake.agree.__code__
_AUTOGRAD = torch.autograd.function.__name__
_OPTIMIZER = horovod_optimizer._DistributedOptimizer.synchronize.__code__


def find_wait(frame):
    """Return the :class:`Wait` that a thread is in, or None."""
    for one in frames_of(frame):
        if one.f_code is _SYNCHRONIZE:
            return Wait(
                ("handle", one.f_locals.get("handle")),
                functools.partial(_describe, one),
                joined=one.f_back is not None and one.f_back.f_code is _JOIN,
            )
        if one.f_code is _AGREE:
            adapter = one.f_locals["adapter"]
            name = handshake.name_of(adapter)
            return Wait(name, functools.partial(_describe_handshake, adapter), handshake=name)
    return None


def _describe_handshake(adapter):
    return f"the handshake of a compressor of {ranks_text(adapter.transport.ranks)}"


def _describe(synchronize):
    for one in frames_of(synchronize.f_back):
        if one.f_code is _OPTIMIZER:
            waited = one.f_locals["p"]
            names = one.f_locals["self"]._parameter_names
            first, *others = waited if isinstance(waited, tuple) else (waited,)
            more = f" and {len(others)} more" if others else ""
            return f"the gradient of {names.get(first)}{more}"
    text = f"hvd.{_outermost(synchronize).f_code.co_name}"
    number = unnamed.number_of(synchronize.f_locals.get("handle"))
    if number is not None:
        text += (
            f" number {number} (without a name, it only matches those with the same number; give"
            " it a name)"
        )
    return text


def _outermost(frame):
    """Return the frame of Horovod's outermost function, which the program called."""
    called = frame
    for one in frames_of(frame):
        module = one.f_globals.get("__name__", "")
        if module.startswith("horovod."):
            called = one
        elif module != _AUTOGRAD:  # Horovod's differentiable functions are called by it
            break
    return called


def is_failure(error):
    """Return whether an exception means that Horovod failed."""
    return isinstance(error, HorovodInternalError)


def watch(adapter):
    """Start to watch an adapter's waits; return the process's :class:`Watcher`."""
    # in elastic training, ``sync`` makes the handshake on all ranks at once
    take_part = None if is_elastic() else functools.partial(handshake.take_part, HorovodTransport)
    # hvd.shutdown() would also drop the handles that the program waits for
    process_watcher = watcher(
        hvd, torch, find_wait, is_failure, mpi_ops._basics.shutdown, None, take_part
    )
    process_watcher.add(adapter)
    return process_watcher


def called_by_horovod(method):
    """Wrap a method of the adapter that Horovod calls.

    A failure of Horovod says which rank is gone; the exception type stays the same. Dynamo never
    traces the method. Tensors that it makes in inference mode can be written outside of it, as
    Horovod's thread and later steps do.
    """

    @torch._disable_dynamo
    @functools.wraps(method)
    def call(adapter, *arguments):
        try:
            if not torch.is_inference_mode_enabled():
                return method(adapter, *arguments)
            with torch.inference_mode(False), torch.no_grad():
                return method(adapter, *arguments)
        except HorovodInternalError as error:
            gone = adapter.watcher.explain()
            if not gone:
                raise
            raise HorovodInternalError(f"{gone}. Horovod said: {error}") from error

    return call
