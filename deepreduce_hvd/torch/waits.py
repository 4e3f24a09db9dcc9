"""Where PyTorch programs wait for other ranks, read off their frames; and what is told when Horovod
has failed.
"""

import functools

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops, optimizer as horovod_optimizer

from deepreduce_hvd.coordination.watch import Wait, frames_of, watcher

_SYNCHRONIZE = mpi_ops.synchronize.__code__
_OPTIMIZER = horovod_optimizer._DistributedOptimizer.synchronize.__code__


def find_wait(frame):
    """The :class:`Wait` that a thread is in, or None."""
    for one in frames_of(frame):
        if one.f_code is _SYNCHRONIZE:
            return Wait(("handle", one.f_locals.get("handle")), functools.partial(_describe, one))
    return None


def _describe(synchronize):
    for one in frames_of(synchronize.f_back):
        if one.f_code is _OPTIMIZER:
            waited = one.f_locals["p"]
            names = one.f_locals["self"]._parameter_names
            first, *others = waited if isinstance(waited, tuple) else (waited,)
            more = f" and {len(others)} more" if others else ""
            return f"the gradient of {names.get(first)}{more}"
    return f"hvd.{_outermost(synchronize)}"


def _outermost(frame):
    """The function of Horovod's that was called first."""
    name = frame.f_code.co_name
    for one in frames_of(frame):
        if not one.f_globals.get("__name__", "").startswith("horovod."):
            break
        name = one.f_code.co_name
    return name


def is_failure(error):
    """Whether an exception says that Horovod has failed."""
    return isinstance(error, HorovodInternalError)


def watch(session):
    """Starts the watch on a session's process; returns the :class:`Watcher`."""
    # hvd.shutdown() itself would also forget the handles that the program waits for
    process_watcher = watcher(hvd, torch, find_wait, is_failure, mpi_ops._basics.shutdown)
    process_watcher.add(session)
    return process_watcher


def names_who_is_gone(method):
    """Wraps a session's method: a failure of Horovod's in it says which rank is gone, under the
    same type.
    """

    @functools.wraps(method)
    def call(session, *arguments):
        try:
            return method(session, *arguments)
        except HorovodInternalError as error:
            gone = session.watcher.explain()
            if not gone:
                raise
            raise HorovodInternalError(f"{gone}. Horovod said: {error}") from error

    return call
