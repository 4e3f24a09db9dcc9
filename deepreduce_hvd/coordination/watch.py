"""A background thread that detects long waits for other ranks and reports which ranks are missing.

Steps have no overhead: if no step has begun for a few seconds, the thread looks at the stack frames
of the program, as a debugger would. When they have not changed for a while, it leaves a note for
the other ranks (:mod:`deepreduce_hvd.coordination.peers`). So a rank that waits learns which other
ranks wait too, which are elsewhere in their program, and which do not report at all.

A rank that waits in a handshake asks the others to take part in it, and the thread of a rank that
waits elsewhere does so (:func:`deepreduce_hvd.coordination.handshake.take_part`).
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

from deepreduce_hvd.coordination import peers
from deepreduce_hvd.coordination.frames import exchange_in, place_of, without_collections
from deepreduce_hvd.coordination.launchers import is_elastic
from deepreduce_hvd.coordination.peers import Board, Note, log
from deepreduce_hvd.user_warnings import warn

#: default of HOROVOD_STALL_CHECK_TIME_SECONDS, which Horovod's own stall inspector reads too
_STALL_SECONDS = 60.0
_LOOK_SECONDS = 5.0
#: maximum time for the thread to end, in seconds
_JOIN_SECONDS = 2.0
#: a note is left after this fraction of the time until the first message
_NOTE_PART = 1 / 6


def _hidden(*modules):
    """Return the directories whose frames do not belong to the user's program.

    These are the directories of the modules' packages, of this package and of the standard library.
    """
    names = {
        name.partition(".")[0] for name in (__name__, *(module.__name__ for module in modules))
    }
    files = [*(sys.modules[name].__file__ for name in names), threading.__file__]
    return tuple(os.path.dirname(file) + os.sep for file in files if file is not None)


class Watcher:
    """Watch the waits of one process; one instance per process.

    Its thread starts with the first adapter.

    Args:
        horovod: Horovod's module for the framework, such as horovod.torch.
        framework: the framework's module.
        find_wait: function of a thread's innermost frame that returns a :class:`Wait` or None.
        is_failure: function that returns whether an exception means that Horovod failed.
        shut_down: function that shuts Horovod down, so that every waiting collective fails. None if
            the waits end by themselves.
        board: the :class:`~deepreduce_hvd.coordination.peers.Board` for notes; by default, that of
            the job that horovodrun started.
        take_part: function that takes part in handshakes that other ranks wait in. Its argument is
            a function of a handshake's name that returns whether a rank waits there. None if this
            is not possible.

    Attributes:
        board: the board, or None if the job has none.
    """

    def __init__(
        self, horovod, framework, find_wait, is_failure, shut_down, board=None, take_part=None
    ):
        self._horovod = horovod
        self._hidden = _hidden(horovod, framework)
        self._find_wait = find_wait
        self._is_failure = is_failure
        self._shut_down = shut_down
        self._take_part = take_part
        self._adapters: weakref.WeakSet = weakref.WeakSet()
        self._process = os.getpid()
        self._stop = threading.Event()
        self.board = Board.of_job() if board is None else board
        self._rank = self._size = 0  # not known yet
        self._limit, self._end_after = _limits(shut_down is not None)
        self._key = self._call = None
        self._step: int | None = None  # at the last look
        self._since = 0.0
        self._next_note = self._next_message = 0.0
        self._noted = False
        self._asked_for = ""  # handshake that this rank has asked the others for
        self._failed_at = None  # step in which Horovod failed and the missing ranks were reported
        self._writes = threading.Lock()  # for notes
        self._closes = False  # whether the thread shuts Horovod down at its end
        atexit.register(self._at_exit)
        self._pause = min(_LOOK_SECONDS, self._limit / 4) if self._limit else None
        # started now, because Python starts no threads at the end of the process
        self._thread = threading.Thread(target=self._run, name="deepreduce-watch", daemon=True)
        self._thread.start()

    def add(self, adapter):
        """Watch an adapter too; its ``progress()`` returns how many steps it has begun."""
        self._adapters.add(adapter)

    @property
    def step(self):
        return max((adapter.progress() for adapter in list(self._adapters)), default=0)

    # --- a long wait ---

    def _run(self):
        while not self._stop.wait(self._pause):
            try:
                self._look()
            except Exception:  # reporting a failure must not cause one
                log.debug("deepreduce_hvd: the watch on waits failed", exc_info=True)
        if self._closes:
            self._shut_down()

    def _knows_place(self):
        """Return whether this process is one of several ranks, and store its rank and the size."""
        with contextlib.suppress(ValueError):  # another thread may shut it down meanwhile
            if self._horovod.is_initialized():
                self._rank, self._size = self._horovod.rank(), self._horovod.size()
        return self._size > 1

    def _look(self):
        if not self._knows_place():
            return
        now, step = time.monotonic(), self.step
        with self._writes:
            if step == self._failed_at:
                return
            self._failed_at = None
        if step != self._step:  # the program goes on, so no frames are read
            self._step = step
            self._begin(None, now)
            return
        with without_collections():
            wait, frames = self._find()
        key = ("elsewhere", step) if wait is None else (wait.key, step)
        if self._key is None:
            self._key = key  # since the look before
            if wait is not None and wait.call is not None:
                return  # it may be over soon, and is not held yet
        elif key != self._key:
            self._begin(key, now)
            return
        call = None if wait is None else wait.call
        if call is not self._call:
            self._begin(key, now, call)
            return
        seconds = now - self._since
        if wait is not None and self._take_part is not None and self.board is not None:
            self._help_handshakes(wait)
        if seconds < self._next_note:
            return
        with without_collections():
            place = next(filter(None, (place_of(frame, self._hidden) for frame in frames)), "")
            note = (
                Note("elsewhere", step, "", place, seconds)
                if wait is None
                else Note("waits", step, wait.describe(), place, seconds)
            )
        with self._writes:
            if self.board is not None and self._failed_at is None:
                self.board.put(self._rank, note)
                self._noted = True
        self._next_note = seconds + max(self._pause, self._limit / 2)
        if wait is None or wait.joined:
            return
        if seconds >= self._next_message:
            self._next_message = 2 * seconds
            log.warning("deepreduce_hvd: %s", self._message(note))
        self._next_note = min(self._next_note, self._next_message, self._end_after)
        if seconds >= self._end_after:
            self._next_note = math.inf
            self._end(note)

    def _help_handshakes(self, wait):
        """Ask for the handshake that this rank waits in, or take part in those of others."""
        if not wait.handshake:
            if not wait.joined:
                self._take_part(self.board.is_asked_for)
        elif not self._asked_for:
            self._asked_for = wait.handshake
            self.board.ask_for(wait.handshake)

    def _end(self, note):
        """Shut Horovod down to end a wait.

        Horovod's background threads still run on all ranks, so the collectives of every rank then
        fail.
        """
        log.error(
            "deepreduce_hvd: %s. Horovod is shut down after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            self._message(note),
        )
        self._shut_down()

    def _begin(self, key, now, call=None):
        if self._noted:
            self.board.remove(self._rank)
            self._noted = False
        if self._asked_for:
            self.board.stop_asking_for(self._asked_for)
            self._asked_for = ""
        self._key, self._call, self._since = key, call, now
        self._next_note, self._next_message = self._limit * _NOTE_PART, self._limit

    def _find(self):
        """Return the wait of a thread of this process, or None, and frames.

        The frames are those of the waiting thread, if any, and of the main thread.
        """
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        main = frames.get(threading.main_thread().ident or 0)
        for find in (exchange_in, self._find_wait):
            for frame in frames.values():
                wait = find(frame)
                if wait is not None:
                    return wait, (frame, main)
        return None, (main,)

    def _message(self, own):
        text = f"rank {self._rank} has waited {own.seconds:.0f} s for {own.what}"
        text += f", at {own.place}, in step {own.step}" if own.place else f", in step {own.step}"
        if self.board is None:
            return (
                f"{text}. This rank does not know which ranks are missing; look for a message "
                "of Horovod on rank 0"
            )
        if not peers.reads(self._rank, self._size):
            return f"{text}. The logs of the first ranks say which ranks are missing"
        notes = {
            rank: self.board.get(rank, own.step) for rank in range(self._size) if rank != self._rank
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
                (
                    f"Nothing is heard from {peers.ranks_text(silent)}: gone, stopped, "
                    f"disconnected, without a compressor, or here for less than {late:.0f} s"
                ),
            )
        return f"{text}. " + (". ".join(found) if found else "All other ranks wait for the same")

    # --- the end ---

    def explain(self, grace=peers.GRACE_SECONDS):
        """Return a text that says which rank is gone, after a failure of Horovod.

        The text is empty if this was reported before for this step, in a job of one rank, and in
        elastic training. In elastic training the other ranks notice the failure only when this rank
        closes its connections, so it must not wait here; the launcher reports which process ended.
        """
        if is_elastic():
            return ""
        step = self.step
        if step == self._failed_at or not self._knows_place():
            return ""
        with self._writes:
            self._failed_at = step
            self._noted = False
        return peers.who_is_gone(self.board, self._rank, self._size, step, grace)

    def report(self, grace=peers.GRACE_SECONDS):
        """Log the text of :meth:`explain`."""
        text = self.explain(grace)
        if text:
            log.error("deepreduce_hvd: rank %d, step %d: %s", self._rank, self.step, text)

    def _at_exit(self):
        """Tell the other ranks how this rank ended."""
        if os.getpid() != self._process:
            return
        alone = (not self._size and not self._knows_place()) or self._size == 1
        error = getattr(sys, "last_value", None)  # the exception that ended the main thread
        failed = not alone and error is not None and self._is_failure(error)
        # Close the connections at once: the other ranks then notice now that this rank exits, not
        # after it has found out which rank is gone.
        self._closes = failed and self._shut_down is not None
        self._stop.set()
        if failed:
            self.report(peers.GRACE_SECONDS_AT_THE_END)
            self._thread.join(None if self._closes else _JOIN_SECONDS)
            return
        self._thread.join(_JOIN_SECONDS)
        if not alone and self.board is not None:
            self.board.put(self._rank, Note("ended", self.step, *_cause(error)))


def _apart(note, own):
    """Return whether another rank is at another place than this one."""
    return (note.state, note.what, note.step) != (own.state, own.what, own.step)


def _cause(error):
    """Return the text and the place of an exception, or an empty tuple for None."""
    if error is None:
        return ()
    what = traceback.format_exception_only(error)[-1].strip()
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return what, f"{last[0].filename}:{last[0].lineno} in {last[0].name}" if last else ""


def _limits(can_end):
    """Read the time limits that Horovod's stall inspector uses.

    Args:
        can_end: whether there is a Horovod to shut down.

    Returns:
        Seconds until the first message (None for no messages), and seconds until Horovod is shut
        down (infinity for never).
    """
    if _number("HOROVOD_STALL_CHECK_DISABLE", 0) > 0:
        return None, math.inf
    limit = _number("HOROVOD_STALL_CHECK_TIME_SECONDS", _STALL_SECONDS)
    end_after = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)
    if limit <= 0:
        limit = _STALL_SECONDS
    if can_end and 0 < end_after < limit:
        warn(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: expected at least"
            f" {limit:g}, the value or default of HOROVOD_STALL_CHECK_TIME_SECONDS, got"
            f" {end_after:g}, which is ignored: a rank that hangs will not end the job"
        )
    return limit, end_after if can_end and end_after >= limit else math.inf


def _number(variable, default):
    try:
        number = float(os.environ.get(variable, default))
    except ValueError:
        return default
    return number if math.isfinite(number) else default


_watcher = None


def watcher(*arguments):
    """Return the process's :class:`Watcher`; create it with these arguments if there is none."""
    global _watcher
    if _watcher is None or _watcher._process != os.getpid():
        _watcher = Watcher(*arguments)
    return _watcher
