"""The handshake: ranks compare how their compressors are configured before anything else of theirs
travels.

A probe tells at every step that ranks differ, and no more; it comes too late for what a
communicator does before its first exchange, and for gradients that some ranks compress and others
do not. So the first time that a compressor is used, all ranks of its process set gather a
description of it. All see the same bytes, hence all raise, or none.

Several compressors may take turns in another order on another rank, when a backward pass takes
another way there. So a handshake is one of the process set: it describes all compressors that still
wait for theirs. And a rank that has waited for some seconds takes part in the handshakes of its
other process sets too, since another rank may wait there for this one.

What comes from other ranks is bounded text. It is compared and shown, and nothing else.
"""

import hashlib
import json
import struct
import time
import weakref
import zlib
from typing import NamedTuple

import numpy as np

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.coordination.roll_call import RollCall
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError

_FRAME = struct.Struct("<4sI")  # the magic, the length of what follows
_MAGIC = b"DRHS"
_CRC_BYTES = 4
_LONGEST_TEXT = 300
_MOST_SHOWN = 3
_PAUSE_SECONDS = 1e-3
#: how long a rank waits for one process set alone
_PATIENCE_SECONDS = 5.0
#: in Horovod's message when a rank has joined and others want to gather
_JOINED = "not supported with Join"

_adapters: weakref.WeakSet = weakref.WeakSet()
_under_way: dict = {}  # the process sets' comparisons that have no result yet


class Setting(NamedTuple):
    """What ranks compare: a name, and a text or a list of lines, of which the first that differs is
    shown.
    """

    name: str
    value: str | list[str]

    @property
    def digest(self):
        text = self.value if isinstance(self.value, str) else "\n".join(self.value)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    @property
    def shown(self):
        return _short(self.value) if isinstance(self.value, str) else f"{len(self.value)} of them"


def register(session):
    """Makes the compressor of ``session`` wait for its handshake. It is ``agreed`` afterwards."""
    session.agreed = False
    _adapters.add(session)


def forget(session):
    """Ranks may have changed: the compressor waits for another handshake."""
    session.agreed = False


def agree(session, with_steps=True):
    """Waits until all ranks of the process set have described this compressor.

    Args:
        session: the adapter's side of the compressor. ``describe(with_steps)`` lists its
            :class:`Setting`.
        with_steps: whether step counters must be equal too. False in elastic training, where all
            ranks come in one order.

    Raises:
        InvalidArgumentError: ranks differ; it names what differs, and what each rank has.
        CorruptPayloadError: a rank sent what is no description.
    """
    transport = session.transport
    if transport.size == 1:
        session.agreed = True
        return
    key = _process_set(session)
    since = time.monotonic()
    try:
        while not session.agreed:
            if key not in _under_way:
                _under_way[key] = _Comparison(session, session.compressor.number, with_steps)
            if _take_results(session):
                continue
            if with_steps and time.monotonic() - since > _PATIENCE_SECONDS:
                _begin_others(session)
            time.sleep(_PAUSE_SECONDS)
    except Exception as error:
        if _JOINED in str(error):
            RollCall(transport, "deepreduce.handshake").wait()
        raise
    finally:
        _under_way.pop(key, None)


def _take_results(session):
    """Of the comparisons that are done; says whether there were any."""
    done = [
        (key, one)
        for key, one in list(_under_way.items())
        if _rank(key) == _rank(_process_set(session)) and one.done()
    ]
    for key, one in done:
        del _under_way[key]
        one.finish()
    return bool(done)


def _begin_others(session):
    """Comparisons in the other process sets, in case that another rank waits in one of them while
    this one waits here.
    """
    own = _process_set(session)
    for other in list(_adapters):
        key = _process_set(other)
        if (
            not other.agreed
            and _rank(key) == _rank(own)
            and key not in _under_way
            and other.transport.size > 1
        ):
            _under_way[key] = _Comparison(other, None, True)


def _process_set(session):
    """What the compressors of one handshake have in common.

    Horovod's libraries for two frameworks know nothing of each other.
    """
    transport = session.transport
    return type(transport), tuple(transport.ranks), transport.rank


def _rank(key):
    """The framework and the rank among all that a process set of :func:`_process_set` is seen from."""
    framework, ranks, place = key
    return framework, ranks[place]


class _Comparison:
    """A gather of the descriptions of all compressors that wait for it in one process set.

    Args:
        session: of one of the compressors.
        number: of the compressor that is used now, or None when none of them is.
        with_steps: as of :func:`agree`.
    """

    def __init__(self, session, number, with_steps):
        key = _process_set(session)
        self._transport = session.transport
        self._waiting = {
            one.compressor.number: one
            for one in (*_adapters, session)
            if not one.agreed and _process_set(one) == key
        }
        self._described = {
            number: one.describe(with_steps) for number, one in self._waiting.items()
        }
        self._gather = _Gather(self._transport)
        self._handle = self._gather.start(_pack(number, self._described))

    def done(self):
        return self._transport.test(self._handle)

    def finish(self):
        """Takes the result: compressors have ``agreed``; raises what :func:`agree` raises."""
        ranks = self._transport.ranks
        tables = [
            _unpack(rank, part) for rank, part in zip(ranks, self._gather.result(self._handle))
        ]
        used = sorted({number for number, _ in tables} - {None})
        for number in used:
            lacking = [
                rank
                for rank, (in_use, table) in zip(ranks, tables)
                if number not in table and in_use is not None
            ]
            if lacking:
                raise InvalidArgumentError(
                    f"expected the same compressor configuration on every rank, got a compressor (the {_ordinal(number)} of its process set) "
                    f"that is not there or was used before on {ranks_text(lacking)}; make the same compressors in the same order on every rank"
                )
        for number, one in sorted(self._waiting.items()):
            rows = [table.get(number) for _, table in tables]
            if all(row == rows[0] for row in rows):
                one.agreed = True
            elif number in used and None not in rows:
                _refuse(self._gather, ranks, rows, self._described[number])


# --- what travels ---


class _Gather:
    """One part of bytes from each rank.

    Names are the same in every handshake: a rank that has missed one is not waited for in the next.
    """

    def __init__(self, transport):
        self._transport = transport
        self._calls = 0

    def __call__(self, own):
        return self.result(self.start(own))

    def start(self, own):
        """A handle."""
        message = np.frombuffer(_FRAME.pack(_MAGIC, len(own)) + own, dtype=np.uint8)
        name = f"deepreduce.handshake.{self._calls}"
        self._calls += 1
        return self._transport.allgather(message, name)

    def result(self, handle):
        """The parts, in the order of ranks."""
        gathered = bytes(self._transport.wait(handle))
        parts, start = [], 0
        for rank in self._transport.ranks:
            if len(gathered) - start < _FRAME.size:
                raise CorruptPayloadError(
                    f"handshake: expected a message from rank {rank}, got {len(gathered) - start} bytes"
                )
            magic, length = _FRAME.unpack_from(gathered, start)
            start += _FRAME.size
            if magic != _MAGIC or length > len(gathered) - start:
                raise CorruptPayloadError(
                    f"handshake: expected a message from rank {rank}, got {magic!r} and a length of {length}"
                )
            parts.append(gathered[start : start + length])
            start += length
        if start != len(gathered):
            raise CorruptPayloadError(f"handshake: expected {start} bytes, got {len(gathered)}")
        return parts


def _pack(number, described):
    table = {
        key: [[one.name, one.digest, one.shown] for one in settings]
        for key, settings in described.items()
    }
    return json.dumps([number, table]).encode()


def _unpack(rank, part):
    """(number of the compressor in use, {number: [[name, digest, shown], ...]}) of one rank."""
    try:
        number, table = json.loads(part)
        table = {
            int(key): [[str(text) for text in row] for row in rows] for key, rows in table.items()
        }
        if (number is not None and type(number) is not int) or any(
            len(row) != 3 for rows in table.values() for row in rows
        ):
            raise ValueError("expected a number and rows of three texts")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayloadError(
            f"handshake: expected a description from rank {rank}, got {_short(repr(part))} ({_short(str(error))})"
        ) from None
    return number, table


# --- what differs ---


def _refuse(gather, ranks, rows, own):
    """Raises InvalidArgumentError that says what differs."""
    tables = [{name: (digest, shown) for name, digest, shown in row} for row in rows]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    lists = {one.name: one.value for one in own if not isinstance(one.value, str)}
    # lists follow from settings, and from each other
    differing = [name for name in differing if name not in lists] or differing[:1]
    found = []
    for name in differing[:_MOST_SHOWN]:
        shown = [table.get(name, ("", "nothing"))[1] for table in tables]
        if name in lists:
            name, shown = _first_difference(gather, name, lists[name])
        found.append(f"{name}={_by_rank(ranks, shown)}")
    rest = f" (and {len(differing) - _MOST_SHOWN} more)" if len(differing) > _MOST_SHOWN else ""
    raise InvalidArgumentError(
        f"expected the same compressor configuration on every rank, at the same step, got {'; '.join(found)}{rest}; give every rank the "
        "same settings and named parameters, freeze the same ones, and load a state on all ranks or broadcast it"
    )


def _first_difference(gather, name, lines):
    """(what it is called, each rank's text) of the first line in which ranks differ; called on all
    ranks, since all found that they do.
    """
    sums = b"".join(
        struct.pack("<I", zlib.crc32(line.encode(errors="backslashreplace"))) for line in lines
    )
    parts = gather(sums)
    shortest = min(map(len, parts)) // _CRC_BYTES
    place = next(
        (
            i
            for i in range(shortest)
            if len({part[_CRC_BYTES * i : _CRC_BYTES * (i + 1)] for part in parts}) > 1
        ),
        shortest,
    )
    line = lines[place] if place < len(lines) else "nothing"
    return f"{name}, number {place}", [
        part.decode(errors="replace") for part in gather(_short(line).encode())
    ]


def _by_rank(ranks, texts):
    """Texts with the ranks that have them: 1024 on ranks 0, 2 and 512 on rank 1."""
    having = {}
    for rank, text in zip(ranks, texts):
        having.setdefault(_short(text), []).append(rank)
    return " and ".join(f"{text} on {ranks_text(some)}" for text, some in having.items())


def _ordinal(number):
    return f"{number + 1}{'th' if number % 100 in (10, 11, 12) else {0: 'st', 1: 'nd', 2: 'rd'}.get(number % 10, 'th')}"


def _short(text):
    """Text on one line, in characters that any terminal shows."""
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
