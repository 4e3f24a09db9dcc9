"""Where TensorFlow programs wait for other ranks, read off their frames; and what is told when
Horovod has failed.

Python sees neither the operators of a graph nor what they wait for. It sees the call that runs the
graph, and the counter of steps that the graph moves on: a call that lasts long while no step begins
waits.
"""

import functools
import re

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from tensorflow.python.eager import execute

from deepreduce_hvd.coordination.watch import Wait, frames_of, watcher

_RUNS_GRAPH = {execute.quick_execute.__code__, execute.execute_with_cancellation.__code__}
_DECORATION = re.compile(r"^(__inference_|__forward_)+|(_\d+)+$")


def find_wait(frame):
    """The :class:`Wait` that a thread is in, or None.

    The frame is the key: it is another one in the next call.
    """
    if frame.f_code in _RUNS_GRAPH:
        return Wait(frame, functools.partial(_describe, frame))
    for one in frames_of(frame):
        if one.f_globals.get("__name__", "").startswith("horovod.tensorflow"):
            return Wait(frame, lambda: "a collective of Horovod's")
    return None


def _describe(frame):
    name = frame.f_locals.get("op_name", b"")
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return f"the TensorFlow function {_DECORATION.sub('', name)}"


def is_failure(error):
    """Whether an exception says that Horovod has failed; within a graph that is an error of
    TensorFlow's.
    """
    while error is not None:
        if isinstance(error, HorovodInternalError) or (
            isinstance(error, tf.errors.OpError) and "Horovod" in error.message
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def watch(session):
    """Starts the watch on a session's process; returns the :class:`Watcher`."""
    process_watcher = watcher(hvd, tf, find_wait, is_failure, hvd.shutdown)
    process_watcher.add(session)
    return process_watcher
