"""The handshake: ranks compare how their compressors are configured before anything else of theirs travels.

A probe tells at every step that ranks differ, and no more; it comes too late for what a communicator does before its first
exchange, and for gradients that some ranks compress and others do not. So the first time that a compressor is used, all
ranks of its process set gather a description of it. All see the same bytes, hence all raise, or none.

Several compressors may take turns in another order on another rank, when a backward pass takes another way there. So a
handshake is one of the process set: it describes all compressors that still wait for theirs.

What comes from other ranks is bounded text. It is compared and shown, and nothing else.
"""

import hashlib
import json
import struct
import weakref
import zlib
from typing import NamedTuple

import numpy as np

from deepreduce_hvd.errors import CorruptPayload, InvalidArgument

_FRAME = struct.Struct("<4sI")  # the magic, the length of what follows
_MAGIC = b"DRHS"
_CRC_BYTES = 4
_LONGEST_TEXT = 300
_MOST_SHOWN = 3
_MOST_RANKS_SHOWN = 8

_sessions: weakref.WeakSet = weakref.WeakSet()


class Setting(NamedTuple):
    """What ranks compare: a name, and a text or a list of lines, of which the first that differs is shown."""

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
    _sessions.add(session)


def forget(session):
    """Ranks may have changed: the compressor waits for another handshake."""
    session.agreed = False


def agree(session, with_steps=True):
    """Waits until all ranks of the process set have described this compressor.

    Args:
        session: the adapter's side of the compressor. ``describe(with_steps)`` lists its :class:`Setting`.
        with_steps: whether step counters must be equal too.

    Raises:
        InvalidArgument: ranks differ; it names what differs, and what each rank has.
        CorruptPayload: a rank sent what is no description.
    """
    transport = session.transport
    if transport.size == 1:
        session.agreed = True
        return
    key = _process_set(session)
    waiting = {one.compressor.number: one for one in (*_sessions, session) if not one.agreed and _process_set(one) == key}
    described = {number: one.describe(with_steps) for number, one in waiting.items()}
    gather = _Gather(transport)
    tables = [_unpack(rank, part) for rank, part in zip(transport.ranks, gather(_pack(session.compressor.number, described)))]
    used = sorted({number for number, _ in tables})
    for number in used:
        lacking = [rank for rank, (_, table) in zip(transport.ranks, tables) if number not in table]
        if lacking:
            raise InvalidArgument(
                f"expected the same compressor configuration on every rank, got a compressor (the {_ordinal(number)} of its process set) "
                f"that is not there or was used before on {listed(lacking)}; make the same compressors in the same order on every rank"
            )
    for number, one in sorted(waiting.items()):
        rows = [table.get(number) for _, table in tables]
        if any(row != rows[0] for row in rows):
            if number in used:
                _refuse(gather, transport.ranks, rows, described[number])
        else:
            one.agreed = True


def _process_set(session):
    """What the compressors of one handshake have in common. Horovod's libraries for two frameworks know nothing of each other."""
    transport = session.transport
    return type(transport), tuple(transport.ranks), transport.rank


# --- what travels ---


class _Gather:
    """One part of bytes from each rank.

    Names are the same in every handshake: a rank that has missed one is not waited for in the next.
    """

    def __init__(self, transport):
        self._transport = transport
        self._calls = 0

    def __call__(self, own):
        message = np.frombuffer(_FRAME.pack(_MAGIC, len(own)) + own, dtype=np.uint8)
        name = f"deepreduce.handshake.{self._calls}"
        self._calls += 1
        gathered = bytes(self._transport.wait(self._transport.allgather(message, name)))
        parts, start = [], 0
        for rank in self._transport.ranks:
            if len(gathered) - start < _FRAME.size:
                raise CorruptPayload(f"handshake: expected a message from rank {rank}, got {len(gathered) - start} bytes")
            magic, length = _FRAME.unpack_from(gathered, start)
            start += _FRAME.size
            if magic != _MAGIC or length > len(gathered) - start:
                raise CorruptPayload(f"handshake: expected a message from rank {rank}, got {magic!r} and a length of {length}")
            parts.append(gathered[start : start + length])
            start += length
        if start != len(gathered):
            raise CorruptPayload(f"handshake: expected {start} bytes, got {len(gathered)}")
        return parts


def _pack(number, described):
    table = {key: [[one.name, one.digest, one.shown] for one in settings] for key, settings in described.items()}
    return json.dumps([number, table]).encode()


def _unpack(rank, part):
    """(number of the compressor in use, {number: [[name, digest, shown], ...]}) of one rank."""
    try:
        number, table = json.loads(part)
        table = {int(key): [[str(text) for text in row] for row in rows] for key, rows in table.items()}
        if type(number) is not int or any(len(row) != 3 for rows in table.values() for row in rows):
            raise ValueError("expected a number and rows of three texts")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPayload(f"handshake: expected a description from rank {rank}, got {_short(repr(part))} ({_short(str(error))})") from None
    return number, table


# --- what differs ---


def _refuse(gather, ranks, rows, own):
    """Raises InvalidArgument that says what differs."""
    tables = [{name: (digest, shown) for name, digest, shown in row} for row in rows]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    lists = {one.name: one.value for one in own if not isinstance(one.value, str)}
    differing = [name for name in differing if name not in lists] or differing[:1]  # lists follow from settings, and from each other
    found = []
    for name in differing[:_MOST_SHOWN]:
        shown = [table.get(name, ("", "nothing"))[1] for table in tables]
        if name in lists:
            name, shown = _first_difference(gather, name, lists[name])
        found.append(f"{name}={_by_rank(ranks, shown)}")
    rest = f" (and {len(differing) - _MOST_SHOWN} more)" if len(differing) > _MOST_SHOWN else ""
    raise InvalidArgument(
        f"expected the same compressor configuration on every rank, at the same step, got {'; '.join(found)}{rest}; give every rank the "
        "same settings and named parameters, freeze the same ones, and load a state on all ranks or broadcast it"
    )


def _first_difference(gather, name, lines):
    """(what it is called, each rank's text) of the first line in which ranks differ; called on all ranks, since all found that they do."""
    sums = b"".join(struct.pack("<I", zlib.crc32(line.encode(errors="backslashreplace"))) for line in lines)
    parts = gather(sums)
    shortest = min(map(len, parts)) // _CRC_BYTES
    place = next((i for i in range(shortest) if len({part[_CRC_BYTES * i : _CRC_BYTES * (i + 1)] for part in parts}) > 1), shortest)
    line = lines[place] if place < len(lines) else "nothing"
    return f"{name}, number {place}", [part.decode(errors="replace") for part in gather(_short(line).encode())]


def _by_rank(ranks, texts):
    """Texts with the ranks that have them: 1024 on ranks 0, 2 and 512 on rank 1."""
    having = {}
    for rank, text in zip(ranks, texts):
        having.setdefault(_short(text), []).append(rank)
    return " and ".join(f"{text} on {listed(some)}" for text, some in having.items())


def listed(ranks):
    """Ranks in a message: rank 1, or ranks 0, 2."""
    rest = f" and {len(ranks) - _MOST_RANKS_SHOWN} more" if len(ranks) > _MOST_RANKS_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_RANKS_SHOWN]))}{rest}"


def _ordinal(number):
    return f"{number + 1}{'th' if number % 100 in (10, 11, 12) else {0: 'st', 1: 'nd', 2: 'rd'}.get(number % 10, 'th')}"


def _short(text):
    """Text on one line, in characters that any terminal shows."""
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
