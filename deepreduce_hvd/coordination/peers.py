"""What ranks tell each other beside Horovod's collectives, when one waits long or Horovod has
failed.

Each rank has one note at horovodrun's rendezvous server, which every job of horovodrun has. Nothing
is written there in normal steps. What others have written is text of strangers: of bounded length,
parsed as JSON, and checked.
"""

import contextlib
import http.client
import json
import logging
import math
import os
import signal
import threading
import time
from typing import NamedTuple

#: seconds that a failed rank listens for the others, at most: elastic training waits for it
GRACE_SECONDS = 2.0
#: the same of a rank that ends; on busy machines some come to their end late
GRACE_SECONDS_AT_THE_END = 5.0
#: of those, what is left once the launcher has asked this process to end; horovodrun kills it after
#: 5
_LAST_SECONDS = 0.5
_TIMEOUT_SECONDS = 1.0
_NOTE_BYTES = 4096
_TEXT_LENGTH = 300
#: how many notes all ranks together may read at once
_READS = 1024
#: of a note
_STATES = ("waits", "elsewhere", "failed", "ended")

log = logging.getLogger("deepreduce_hvd")


class Note(NamedTuple):
    """What a rank says of itself.

    Attributes:
        state: ``waits`` for other ranks, is ``elsewhere``, ``failed`` since Horovod has, or has
            ``ended``.
        step: how many steps it has begun.
        what: it waits for, or the error that ended it.
        place: in its program.
        seconds: for how long.
    """

    state: str
    step: int
    what: str = ""
    place: str = ""
    seconds: float = 0.0

    def pack(self):
        return json.dumps(
            [
                self.state,
                self.step,
                self.what[:_TEXT_LENGTH],
                self.place[:_TEXT_LENGTH],
                self.seconds,
            ]
        ).encode()

    @classmethod
    def unpack(cls, data):
        """The note that these bytes hold, or None when they hold none."""
        try:
            state, step, what, place, seconds = json.loads(data)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = isinstance(what, str) and isinstance(place, str)
        numbers = type(step) is int and isinstance(seconds, (int, float)) and math.isfinite(seconds)
        if state not in _STATES or not texts or not numbers:
            return None
        return cls(state, step, _printable(what), _printable(place), float(seconds))


def _printable(text):
    return "".join(
        character if character.isprintable() else "?" for character in text[:_TEXT_LENGTH]
    )


class Board:
    """The notes of all ranks of a job.

    Args:
        address, port: of a server that keeps what is PUT at ``/scope/key``, as Horovod's rendezvous
            server does.
    """

    def __init__(self, address, port):
        self._address = address
        self._port = port

    @classmethod
    def of_job(cls):
        """The board of the job that started this process, or None where there is no such server, as
        under mpirun.
        """
        address, port = (
            os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
            os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
        )
        return cls(address, int(port)) if address and port.isdecimal() else None

    def put(self, rank, note):
        """Leaves a rank's note in place of its last one; says whether that went well."""
        return self._request("PUT", rank, note.pack()) is not None

    def get(self, rank, step=0):
        """A rank's :class:`Note`, or None when there is none that can be read.

        ``step``: how many steps this rank has begun, so that the others have ended all but the last
        of them. What they had to say before is of the past.
        """
        data = self._request("GET", rank)
        note = Note.unpack(data) if data else None
        past = note is not None and note.state in ("waits", "elsewhere") and note.step < step - 1
        return None if past else note

    def remove(self, rank):
        self._request("DELETE", rank)

    def _request(self, method, rank, body=None):
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request(method, f"/deepreduce/rank.{rank}", body)
            answer = connection.getresponse()
            data = answer.read(_NOTE_BYTES + 1)
            return data if answer.status == 200 and len(data) <= _NOTE_BYTES else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def reads(rank, size):
    """Whether a rank reads the others' notes: all do in small jobs, the first ones in large jobs."""
    return rank < max(2, _READS // size)


def who_is_gone(board, rank, size, step, grace=GRACE_SECONDS):
    """Tells the other ranks that this one has failed with Horovod, and finds out which of them have
    not.

    Args:
        board: a :class:`Board`, or None.
        rank, size: of this process, and of the job.
        step: how many steps it has begun.
        grace: how many seconds this may take at most.

    Returns:
        What is known, as a text.
    """
    started = time.monotonic()
    if board is None or not board.put(rank, Note("failed", step)):
        return "which rank is gone is not known here; the rank that ended first has the cause in its messages"
    if not reads(rank, size):
        return f"the messages of ranks 0 to {max(2, _READS // size) - 1} say which rank is gone"
    notes = {other: None for other in range(size) if other != rank}
    silent = list(notes)
    with _ending_deferred() as ending:
        deadline, pause = started + grace, 0.005
        while silent and time.monotonic() < deadline:
            for other in silent:
                notes[other] = board.get(other, step)
                if time.monotonic() > deadline:
                    break
            silent = [
                other
                for other in silent
                if notes[other] is None or notes[other].state not in ("failed", "ended")
            ]
            if ending.is_set():
                deadline = min(deadline, time.monotonic() + _LAST_SECONDS)
            if silent:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        text = _verdict(size, notes, time.monotonic() - started, ending.is_set())
        if ending.is_set():
            log.error("deepreduce_hvd: rank %d, step %d: %s", rank, step, text)
    return text


def _verdict(size, notes, seconds, ending):
    found = []
    silent = [rank for rank, note in notes.items() if note is None]
    if silent:
        doubt = (
            ", before this rank was told to end; others may have been too: the launcher's messages say which ended first"
            if ending
            else ""
        )
        if len(silent) > 1:
            doubt = f"{doubt} (some of them may only not have noticed yet)"
        found.append(f"no sign of life from {ranks_text(silent)} within {seconds:.2g} s{doubt}")
    for rank, note in notes.items():
        if note is None or note.state == "failed":
            continue
        if note.state != "ended":
            found.append(f"rank {rank} last heard of {where(note)}")
        elif note.what:
            found.append(f"rank {rank} ended in step {note.step} by {note.what}{_at(note.place)}")
        else:
            found.append(f"rank {rank} came to the end of its program after {note.step} steps")
    if not found:
        return f"all of {size} ranks are alive: a connection was lost or a time limit passed, as Horovod's own messages say"
    return f"expected all of {size} ranks to go on, got " + "; ".join(found)


def where(note):
    """Where a rank is that has not ended, for a sentence."""
    if note.state == "waits":
        return f"waiting for {note.what}{_at(note.place)} in step {note.step}, for {note.seconds:.0f} s"
    return f"elsewhere{_at(note.place)} in step {note.step}, for {note.seconds:.0f} s"


def _at(place):
    return f" at {place}" if place else ""


def ranks_text(ranks):
    """``rank 1`` or ``ranks 1, 2``; of many, the first."""
    shown = ", ".join(map(str, ranks[:16])) + (
        f" and {len(ranks) - 16} others" if len(ranks) > 16 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@contextlib.contextmanager
def _ending_deferred():
    """Holds back SIGTERM for as long as it is asked who is gone: horovodrun sends it to survivors
    at once, and kills them 5 s later.

    Only where the signal would end the process; it does, afterwards. Yields an event that is set
    when it has come.
    """
    came = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield came
        return
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
