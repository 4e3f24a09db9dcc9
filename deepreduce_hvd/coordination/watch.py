"""Watches, from a thread of its own, whether this rank waits long for others, and says who is
missing.

A step costs nothing: every few seconds the thread looks at where the program is, as a debugger
would. It leaves a note for the other ranks when that has not changed for a while
(:mod:`deepreduce_hvd.coordination.peers`), so a rank that waits learns which of the others wait
too, which are elsewhere, and which say nothing at all.
"""

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import traceback
import weakref
from typing import NamedTuple

from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.coordination import peers
from deepreduce_hvd.coordination.peers import Board, Note, log

#: the default of HOROVOD_STALL_CHECK_TIME_SECONDS, which Horovod's own stall inspector reads too
_STALL_SECONDS = 60.0
_LOOK_SECONDS = 5.0
#: what the thread may take to end
_JOIN_SECONDS = 2.0
#: a note is left after this part of the time until the message
_NOTE_PART = 1 / 6
_EXCHANGES = {Exchange.wait.__code__, Exchange._send.__code__}


class Wait(NamedTuple):
    """A wait for other ranks, as a thread's frames show it.

    Attributes:
        key: what tells it from the next one.
        describe: a function that returns what it waits for, as a text.
    """

    key: object
    describe: object


def frames_of(frame):
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def exchange_in(frame):
    """The :class:`Wait` of an exchange of ours that a thread is in, or None."""
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
    """``file:line in function`` of the innermost frame that is in none of the directories
    ``hidden``.
    """
    for one in frames_of(frame):
        path = one.f_code.co_filename
        if path.startswith("<") or any(path.startswith(directory) for directory in hidden):
            continue
        return f"{path}:{one.f_lineno} in {one.f_code.co_name}"
    return ""


def _hidden(*modules):
    """Directories whose frames are not the user's: of these modules' packages, and of this one."""
    names = {
        name.partition(".")[0] for name in (__name__, *(module.__name__ for module in modules))
    }
    files = [*(sys.modules[name].__file__ for name in names), threading.__file__]
    return tuple(os.path.dirname(file) + os.sep for file in files)


class Watcher:
    """One a process. Its thread starts with the first session.

    Args:
        horovod: an adapter's module, such as horovod.torch.
        framework: the framework's module.
        find_wait: a function of a thread's innermost frame that returns a :class:`Wait`, or None.
        is_failure: a function that tells whether an exception is Horovod's failure.
        shut_down: a function that shuts Horovod down, so that what waits for it fails.
    """

    def __init__(self, horovod, framework, find_wait, is_failure, shut_down):
        self._horovod = horovod
        self._hidden = _hidden(horovod, framework)
        self._find_wait = find_wait
        self._is_failure = is_failure
        self._shut_down = shut_down
        self._adapters = weakref.WeakSet()
        self._process = os.getpid()
        self._stop = threading.Event()
        self._board = Board.of_job()
        self._rank = self._size = None
        self._limit, self._end_after = _limits()
        self._key = self._since = None
        self._next_note = self._next_message = 0.0
        self._noted = False
        self._failed_at = None  # the step in which Horovod failed and it was said who is gone
        self._writes = threading.Lock()  # of notes
        self._thread = None
        atexit.register(self._at_exit)
        if self._limit:
            self._pause = min(_LOOK_SECONDS, self._limit / 4)
            self._thread = threading.Thread(target=self._run, name="deepreduce-watch", daemon=True)
            self._thread.start()

    def add(self, session):
        """``session.progress()`` says how many steps it has begun."""
        self._adapters.add(session)

    @property
    def step(self):
        return max((session.progress() for session in list(self._adapters)), default=0)

    # --- a long wait ---

    def _run(self):
        while not self._stop.wait(self._pause):
            try:
                self._look()
            except Exception:  # what only tells of failures must not make one
                log.debug("deepreduce_hvd: the watch on waits failed", exc_info=True)

    def _knows_place(self):
        """Whether this process is one of several ranks; notes which."""
        with contextlib.suppress(ValueError):  # another thread has shut it down in between
            if self._horovod.is_initialized():
                self._rank, self._size = self._horovod.rank(), self._horovod.size()
        return self._size is not None and self._size > 1

    def _look(self):
        if not self._knows_place():
            return
        now, step = time.monotonic(), self.step
        with self._writes:
            if step == self._failed_at:
                return
            self._failed_at = None
        wait, frames = self._find()
        key = ("elsewhere", step) if wait is None else (wait.key, step)
        if self._key is None or key != self._key:
            self._begin(key, now)
            return
        seconds = now - self._since
        if seconds < self._next_note:
            return
        place = next(filter(None, (place_of(frame, self._hidden) for frame in frames)), "")
        note = (
            Note("elsewhere", step, "", place, seconds)
            if wait is None
            else Note("waits", step, wait.describe(), place, seconds)
        )
        with self._writes:
            if self._board is not None and self._failed_at is None:
                self._board.put(self._rank, note)
                self._noted = True
        self._next_note = seconds + max(self._pause, self._limit / 2)
        if wait is not None and seconds >= self._next_message:
            self._next_message = 2 * seconds
            log.warning("deepreduce_hvd: %s", self._message(note))
        if wait is not None:
            self._next_note = min(self._next_note, self._next_message, self._end_after)
            if seconds >= self._end_after:
                self._next_note = math.inf
                self._end(note)

    def _end(self, note):
        """Ends a wait: Horovod's threads are alive on all ranks, so its shutdown makes every rank's
        collectives fail.
        """
        log.error(
            "deepreduce_hvd: %s. Horovod is shut down, as HOROVOD_STALL_SHUTDOWN_TIME_SECONDS asks for",
            self._message(note),
        )
        self._shut_down()

    def _begin(self, key, now):
        if self._noted:
            self._board.remove(self._rank)
            self._noted = False
        self._key, self._since = key, now
        self._next_note, self._next_message = self._limit * _NOTE_PART, self._limit

    def _find(self):
        """(the wait that a thread of this process is in or None, that thread's frame and the main
        thread's).
        """
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        main = frames.get(threading.main_thread().ident)
        for find in (exchange_in, self._find_wait):
            for frame in frames.values():
                wait = find(frame)
                if wait is not None:
                    return wait, (frame, main)
        return None, (main,)

    def _message(self, own):
        text = f"rank {self._rank} has waited {own.seconds:.0f} s for {own.what}"
        text += f", at {own.place}, in step {own.step}" if own.place else f", in step {own.step}"
        if self._board is None:
            return f"{text}. Which ranks are missing is not known here; rank 0 has Horovod's message, if any"
        if not peers.reads(self._rank, self._size):
            return f"{text}. The messages of the first ranks say who is missing"
        notes = {
            rank: self._board.get(rank, own.step)
            for rank in range(self._size)
            if rank != self._rank
        }
        silent = [rank for rank, note in notes.items() if note is None]
        found = [
            f"Rank {rank} is {peers.where(note)}"
            for rank, note in notes.items()
            if note is not None and _apart(note, own)
        ]
        if silent:
            late = self._limit * _NOTE_PART + self._pause
            found.insert(
                0,
                f"Nothing is heard of {peers.ranks_text(silent)}: gone, stopped, cut off, or there for less than {late:.0f} s",
            )
        return f"{text}. " + (". ".join(found) if found else "All other ranks wait for the same")

    # --- the end ---

    def explain(self, grace=peers.GRACE_SECONDS):
        """After Horovod's failure: which rank is gone, as a text; empty when that has been said, or
        cannot matter.

        In elastic training nothing is asked: ranks that wait for this one notice the failure only
        when it lets go of its connections. The launcher names the process that ended.
        """
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            return ""
        step = self.step
        if step == self._failed_at or not self._knows_place():
            return ""
        with self._writes:
            self._failed_at = step
            self._noted = False
        return peers.who_is_gone(self._board, self._rank, self._size, step, grace)

    def report(self, grace=peers.GRACE_SECONDS):
        """Logs what :meth:`explain` says."""
        text = self.explain(grace)
        if text:
            log.error("deepreduce_hvd: rank %d, step %d: %s", self._rank, self.step, text)

    def _at_exit(self):
        """Tells the other ranks how this one ended."""
        if os.getpid() != self._process:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        if (self._size is None and not self._knows_place()) or self._size == 1:
            return
        error = getattr(sys, "last_value", None)  # what ended the main thread
        if error is not None and self._is_failure(error):
            # ranks that are connected with this one see at once that it goes, and not only after it
            # has asked who is gone
            closing = threading.Thread(target=self._shut_down, daemon=True)
            closing.start()
            self.report(peers.GRACE_SECONDS_AT_THE_END)
            closing.join()
        elif self._board is not None:
            self._board.put(self._rank, Note("ended", self.step, *_cause(error)))


def _apart(note, own):
    """Whether a rank is not where this one is."""
    return (note.state, note.what, note.step) != (own.state, own.what, own.step)


def _cause(error):
    """(what, where) of an exception."""
    if error is None:
        return ()
    what = traceback.format_exception_only(error)[-1].strip()
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return what, f"{last[0].filename}:{last[0].lineno} in {last[0].name}" if last else ""


def _limits():
    """(seconds until the first message, None for no messages; seconds until Horovod is shut down),
    as Horovod's stall inspector has them.
    """
    if _number("HOROVOD_STALL_CHECK_DISABLE", 0) > 0:
        return None, math.inf
    limit = _number("HOROVOD_STALL_CHECK_TIME_SECONDS", _STALL_SECONDS)
    end_after = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)
    if limit <= 0:
        limit = _STALL_SECONDS
    return limit, end_after if end_after >= limit else math.inf


def _number(variable, default):
    try:
        number = float(os.environ.get(variable, default))
    except ValueError:
        return default
    return number if math.isfinite(number) else default


_watcher = None


def watcher(*arguments):
    """The process's :class:`Watcher`, made with these arguments when there is none."""
    global _watcher
    if _watcher is None or _watcher._process != os.getpid():
        _watcher = Watcher(*arguments)
    return _watcher
