"""Read the stack frames of the program, to find out where it is and what it waits for."""

import contextlib
import gc
import types
from collections.abc import Iterator
from typing import NamedTuple

from deepreduce_hvd.communicators.exchange import Exchange

_EXCHANGES = {Exchange.wait.__code__, Exchange._send.__code__}


class Wait(NamedTuple):
    """A wait for other ranks, found in the frames of a thread.

    Attributes:
        key: identifies the wait; two waits can have the same key if ``call`` is given.
        describe: function without arguments that returns a text: what the thread waits for.
        handshake: name of the handshake that the thread waits in, or an empty text.
        joined: whether this rank has joined, and so must not start a collective. It may wait for as
            long as the others train, so there is no message and no end.
        call: object that tells two waits of equal key apart. The watcher holds it only while a wait
            seems to last, because a frame holds the user's tensors.
    """

    key: object
    describe: object
    handshake: str = ""
    joined: bool = False
    call: object = None


@contextlib.contextmanager
def without_collections():
    """Keep the garbage collector off while this thread reads the frames of other threads.

    Before Python 3.12, making the object of a frame can start a collection. If a finalizer then
    lets the other thread run, the frame may end while it is being read, and the process crashes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def frames_of(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def exchange_in(frame):
    """Return the :class:`Wait` of the exchange in which a thread waits, or None.

    Args:
        frame: the innermost stack frame of the thread.
    """
    for one in frames_of(frame):
        if one.f_code in _EXCHANGES:
            exchange = one.f_locals.get("self")
            return (
                None
                if exchange is None
                else Wait(("exchange", id(exchange), exchange.channel.rounds), exchange.describe)
            )
    return None


def place_of(frame, hidden):
    """Return ``file:line in function`` of the innermost frame of the user's program.

    Frames of files in the directories ``hidden`` are skipped. Empty if no frame is left.
    """
    for one in frames_of(frame):
        path = one.f_code.co_filename
        if path.startswith("<") or any(path.startswith(directory) for directory in hidden):
            continue
        return f"{path}:{one.f_lineno} in {one.f_code.co_name}"
    return ""
