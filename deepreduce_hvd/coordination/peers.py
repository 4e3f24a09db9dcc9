"""Notes between ranks, outside of Horovod's collectives, for long waits and failures of Horovod.

Each rank has one note at the rendezvous server of horovodrun. Every job that horovodrun starts has
such a server. A rank can also ask the others there to take part in a handshake that it waits in.
Normal steps write nothing there. The notes of other ranks are untrusted text: their length is
limited, they are parsed as JSON, and every field is checked.
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

#: maximum time in seconds that a failed rank waits for the notes of the others; elastic training
#: waits meanwhile
GRACE_SECONDS = 2.0
#: the same for a rank that exits; on busy machines some ranks exit late
GRACE_SECONDS_AT_THE_END = 5.0
#: the same after the launcher has sent SIGTERM; horovodrun kills the process 5 s after that signal
_LAST_SECONDS = 0.5
_TIMEOUT_SECONDS = 1.0
_NOTE_BYTES = 4096
_TEXT_LENGTH = 300
#: maximum number of notes that all ranks together read at once
_READS = 1024
#: states of a note
_STATES = ("waits", "elsewhere", "failed", "ended")

log = logging.getLogger("deepreduce_hvd")


class Note(NamedTuple):
    """A rank's report about itself.

    Attributes:
        state: ``waits`` (for other ranks), ``elsewhere`` (not in a wait), ``failed`` (because
            Horovod failed) or ``ended``.
        step: number of steps that the rank has begun.
        what: what the rank waits for, or the error that ended it.
        place: place in the program, ``file:line in function``.
        seconds: time in this state, in seconds.
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
        """Return the note in these bytes, or None if they are not a valid note."""
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
        address, port: of an HTTP server that stores what is PUT at ``/scope/key``, as Horovod's
            rendezvous server does.
    """

    def __init__(self, address, port):
        self._address = address
        self._port = port

    @classmethod
    def of_job(cls):
        """Return the board of the job that started this process.

        Return None where there is no rendezvous server, as under mpirun.
        """
        address, port = (
            os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
            os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
        )
        return cls(address, int(port)) if address and port.isdecimal() else None

    def put(self, rank, note):
        """Replace a rank's note; return whether this succeeded."""
        return self._request("PUT", _key(rank), note.pack()) is not None

    def get(self, rank, step=0):
        """Return a rank's :class:`Note`, or None if there is no valid and current one.

        Args:
            rank: rank whose note to read.
            step: number of steps that this rank has begun. All ranks have then finished every step
                but the last, so a note ``waits`` or ``elsewhere`` of an earlier step is outdated
                and ignored.
        """
        data = self._request("GET", _key(rank))
        note = Note.unpack(data) if data else None
        past = note is not None and note.state in ("waits", "elsewhere") and note.step < step - 1
        return None if past else note

    def remove(self, rank):
        self._request("DELETE", _key(rank))

    # One request per handshake, not per rank, so that the waiting ranks of a large job send few
    # requests.

    def ask_for(self, name):
        """Ask all ranks to take part in a handshake; ``name`` must be valid in a URL."""
        self._request("PUT", name, b"waits")

    def is_asked_for(self, name):
        """Return whether a rank has asked for this handshake."""
        return self._request("GET", name) is not None

    def stop_asking_for(self, name):
        self._request("DELETE", name)

    def _request(self, method, key, body=None):
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request(method, f"/deepreduce/{key}", body)
            answer = connection.getresponse()
            data = answer.read(_NOTE_BYTES + 1)
            return data if answer.status == 200 and len(data) <= _NOTE_BYTES else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _key(rank):
    return f"rank.{rank}"


def reads(rank, size):
    """Return whether a rank reads the notes of others: in large jobs, only the first ranks do."""
    return rank < max(2, _READS // size)


def who_is_gone(board, rank, size, step, grace=GRACE_SECONDS):
    """Report that this rank failed with Horovod, and find out which ranks did not report.

    Args:
        board: a :class:`Board`, or None.
        rank, size: rank of this process, and number of ranks in the job.
        step: number of steps that this rank has begun.
        grace: maximum time for this, in seconds.

    Returns:
        A text that says what is known.
    """
    started = time.monotonic()
    if board is None or not board.put(rank, Note("failed", step)):
        return (
            "this rank does not know which rank is gone; the cause is in the log of the rank "
            "that ended first"
        )
    if not reads(rank, size):
        return f"the logs of ranks 0 to {max(2, _READS // size) - 1} say which rank is gone"
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
                if (note := notes[other]) is None or note.state not in ("failed", "ended")
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
            (
                "; then this rank received SIGTERM, and others may have too: the log of the "
                "launcher says which rank ended first"
            )
            if ending
            else ""
        )
        if len(silent) > 1:
            doubt = f"{doubt} (some of them may not have noticed the failure yet)"
        found.append(
            f"no sign of life from {ranks_text(silent)} within {seconds:.2g} s: gone, or without a"
            f" compressor{doubt}"
        )
    for rank, note in notes.items():
        if note is None or note.state == "failed":
            continue
        if note.state != "ended":
            found.append(f"rank {rank} last heard of {where(note)}")
        elif note.what:
            found.append(f"rank {rank} ended in step {note.step} by {note.what}{_at(note.place)}")
        else:
            found.append(f"rank {rank} reached the end of its program after {note.step} steps")
    if not found:
        return (
            f"all {size} ranks are alive: a connection was lost or a time limit passed, see "
            "the messages of the library that communicates"
        )
    return f"expected all {size} ranks to continue, got " + "; ".join(found)


def where(note):
    """Return a text, part of a sentence, that says where a running rank is in its program."""
    if note.state == "waits":
        return (
            f"waiting for {note.what}{_at(note.place)} in step {note.step}, for "
            f"{note.seconds:.0f} s"
        )
    return f"elsewhere{_at(note.place)} in step {note.step}, for {note.seconds:.0f} s"


def _at(place):
    return f" at {place}" if place else ""


def ranks_text(ranks):
    """Return a text such as ``rank 1`` or ``ranks 1, 2``.

    It lists at most 16 ranks, and then the number of the others.
    """
    shown = ", ".join(map(str, ranks[:16])) + (
        f" and {len(ranks) - 16} others" if len(ranks) > 16 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@contextlib.contextmanager
def _ending_deferred():
    """Defer SIGTERM while this rank finds out which rank is gone.

    horovodrun sends SIGTERM to the survivors at once and kills them 5 s later. The signal is
    deferred only in the main thread and only if it would end the process. It is raised again
    afterwards. Yields an event that is set when the signal has arrived.
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
