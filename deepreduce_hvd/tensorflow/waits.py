"""Waits of TensorFlow programs for other ranks, found in their frames; error texts after failures.

Python does not see the operators of a graph, nor what they wait for. It sees the call that runs the
graph, and the step counter that the graph increments. A call that takes long while no step begins
is a wait.
"""

import functools
import re

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from tensorflow.python.eager import execute

from deepreduce_hvd.coordination.frames import Wait, frames_of
from deepreduce_hvd.coordination.watch import watcher

_RUNS_GRAPH = {execute.quick_execute.__code__, execute.execute_with_cancellation.__code__}
_DECORATION = re.compile(r"^(__inference_|__forward_)+|(_\d+)+$")


def find_wait(frame):
    """Return the :class:`Wait` that a thread is in, or None.

    The frame identifies the wait, because each call has a frame of its own.
    """
    if frame.f_code in _RUNS_GRAPH:
        return Wait(id(frame), functools.partial(_describe, frame), call=frame)
    for one in frames_of(frame):
        if one.f_globals.get("__name__", "").startswith("horovod.tensorflow"):
            return Wait(id(frame), lambda: "a collective of Horovod", call=frame)
    return None


def _describe(frame):
    name = frame.f_locals.get("op_name", b"")
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return f"the TensorFlow function {_DECORATION.sub('', name)}"


def is_failure(error):
    """Return whether an exception means that Horovod failed.

    Within a graph this is an error of TensorFlow.
    """
    while error is not None:
        if isinstance(error, HorovodInternalError) or (
            isinstance(error, tf.errors.OpError) and "Horovod" in error.message
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def watch(adapter):
    """Start to watch an adapter's waits; return the process's :class:`Watcher`."""
    process_watcher = watcher(hvd, tf, find_wait, is_failure, hvd.shutdown)
    process_watcher.add(adapter)
    return process_watcher
