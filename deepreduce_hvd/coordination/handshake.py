"""The handshake: ranks compare the configurations of their compressors before any other message.

The probe of each step detects that configurations differ, but it cannot name the difference. The
probe is also too late for what a communicator does before its first exchange, such as measuring the
network, and for gradients that only some ranks compress. So at the first use of a compressor, all
ranks of its process set gather a description of it. All ranks see the same bytes, so either all
ranks raise an error or none.

When a backward pass takes different paths on different ranks, the ranks may use several compressors
for the first time in different orders. So one handshake covers all compressors of the process set
that still need one. A rank that has waited here for some seconds also takes part in the handshakes
of its other process sets, because another rank may wait there for this one. A rank that waits
elsewhere takes part only in a handshake in which another rank is known to wait
(:func:`take_part`).
"""

import hashlib
import struct
import threading
import time
import weakref
import zlib

from deepreduce_hvd.coordination.handshake_messages import Gather, by_rank, pack, short, unpack
from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.coordination.roll_call import RollCall
from deepreduce_hvd.errors import InvalidArgumentError

_CRC_BYTES = 4
_MOST_SHOWN = 3
_PAUSE_SECONDS = 1e-3
#: seconds that a rank waits for one process set before it takes part in handshakes of others
_PATIENCE_SECONDS = 5.0
#: in Horovod's error message when a rank has joined and other ranks gather
_JOINED = "not supported with Join"

_adapters: weakref.WeakSet = weakref.WeakSet()
#: key of a process set -> its comparison in progress, or None while it is started
_under_way: dict = {}
#: for ``_under_way``, which the thread of the watch on waits uses too
_lock = threading.Lock()


def register(adapter):
    """Register a compressor's adapter for the handshake.

    ``adapter.agreed`` is False until its handshake is done.
    """
    adapter.agreed = False
    _adapters.add(adapter)


def forget(adapter):
    """Require another handshake of a compressor, because ranks may have changed."""
    adapter.agreed = False


def agree(adapter, with_steps=True):
    """Wait until all ranks of the process set have described this compressor.

    Args:
        adapter: adapter of the compressor. Its ``describe(with_steps)`` returns the list of
            :class:`~deepreduce_hvd.coordination.compared_settings.Setting`.
        with_steps: whether step counters must be equal too. False in elastic training, where all
            ranks call this in the same order.

    Raises:
        InvalidArgumentError: the ranks' settings differ; the message names those settings and their
            values on each rank. Or this rank is not in the process set.
        CorruptPayloadError: a rank sent bytes that are not a description.
    """
    transport = adapter.transport
    if not transport.includes_this_rank:
        adapter.expect_member("compress")
    if transport.size == 1:
        adapter.agreed = True
        return
    key = _process_set(adapter)
    since = time.monotonic()
    try:
        while not adapter.agreed:
            _begin(adapter, adapter.compressor.number, with_steps)
            if _take_results(adapter):
                continue
            if with_steps and time.monotonic() - since > _PATIENCE_SECONDS:
                _begin_others(adapter)
            time.sleep(_PAUSE_SECONDS)
    except BaseException as error:
        with _lock:
            _under_way.pop(key, None)
        if _JOINED in str(error):
            RollCall(transport, "deepreduce.handshake").wait()
        raise


def name_of(adapter):
    """Return a name of the handshake of a compressor, which is equal on its ranks."""
    ranks = hashlib.sha256(repr(list(adapter.transport.ranks)).encode()).hexdigest()[:16]
    return f"handshake.{ranks}.{adapter.compressor.number}"


def take_part(transport_class, is_awaited):
    """Start the comparisons that other ranks wait for, while this rank waits elsewhere.

    :func:`agree` collects their results later. A comparison that no rank waits for is not started:
    the others might join it so late that Horovod would consider it stalled.

    Args:
        transport_class: class of the compressors' transports. Its gathers must be asynchronous, may
            start in any thread, and must be matched by name.
        is_awaited: function that takes a handshake's name (:func:`name_of`) and returns whether a
            rank waits in it.
    """
    for other in list(_adapters):
        # in elastic training, all ranks call ``sync`` at once
        if type(other.transport) is not transport_class or other.elastic is not None:
            continue
        if not other.agreed and _takes_part(other) and is_awaited(name_of(other)):
            _begin(other, None, True)


def _begin(adapter, number, with_steps):
    """Start a comparison, unless one of its process set is in progress or it is not needed.

    Arguments are those of :class:`_Comparison`.
    """
    key = _process_set(adapter)
    with _lock:
        if adapter.agreed or key in _under_way:
            return
        _under_way[key] = None  # so that no other thread starts it too
    try:
        _under_way[key] = _Comparison(adapter, number, with_steps)
    except BaseException:
        with _lock:
            _under_way.pop(key, None)
        raise


def _take_results(adapter):
    """Finish the comparisons that are done; return whether there were any."""
    rank, found = _rank(_process_set(adapter)), False
    with _lock:
        under_way = list(_under_way.items())
    for key, one in under_way:
        if one is None or _rank(key) != rank or not one.done():
            continue
        found = True
        try:
            one.finish()
        finally:  # only now, so that no other thread starts the same comparison meanwhile
            with _lock:
                _under_way.pop(key, None)
    return found


def _begin_others(adapter):
    """Start the comparisons of this rank's other process sets.

    Another rank may wait in one of them while this rank waits here.
    """
    own = _process_set(adapter)
    for other in list(_adapters):
        if not _is_alike(other, adapter) or not _takes_part(other):
            continue
        if _rank(_process_set(other)) == _rank(own):
            _begin(other, None, True)


def _process_set(adapter):
    """Return a key that is equal for the compressors of one handshake.

    It contains the framework, because Horovod's libraries for two frameworks are independent.
    """
    transport = adapter.transport
    return type(transport), tuple(transport.ranks), transport.rank


def _is_alike(adapter, other):
    """Return whether two adapters communicate by the same library.

    Another library may not be initialized.
    """
    return type(adapter.transport) is type(other.transport)


def _takes_part(adapter):
    """Return whether this rank is in an adapter's process set, with others.

    A rank outside of it may create the same compressors as the others. A process set that was
    removed has no size.
    """
    return (adapter.transport.size or 0) > 1 and adapter.transport.includes_this_rank


def _rank(key):
    """Return the framework and this process's global rank from a key of :func:`_process_set`."""
    framework, ranks, place = key
    return framework, ranks[place]


class _Comparison:
    """The gathered descriptions of all compressors of one process set that wait for a handshake.

    Args:
        adapter: adapter of one of the compressors.
        number: number of the compressor in use now, or None if none of them is in use.
        with_steps: as in :func:`agree`.
    """

    def __init__(self, adapter, number, with_steps):
        key = _process_set(adapter)
        self._transport = adapter.transport
        self._waiting = {
            one.compressor.number: one
            for one in (*_adapters, adapter)
            if not one.agreed
            and _is_alike(one, adapter)
            and _takes_part(one)
            and _process_set(one) == key
        }
        self._described = {
            number: one.describe(with_steps) for number, one in self._waiting.items()
        }
        self._gather = Gather(self._transport)
        self._handle = self._gather.start(pack(number, self._described))

    def done(self):
        return self._transport.test(self._handle)

    def finish(self):
        """Mark the compressors that agree as ``agreed``; raise what :func:`agree` raises."""
        ranks = self._transport.ranks
        tables = [
            unpack(rank, part) for rank, part in zip(ranks, self._gather.result(self._handle))
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
                    "expected the same compressor configuration on every rank, got a "
                    f"compressor (the {_ordinal(number)} of its process set) "
                    f"that does not exist or was used before on {ranks_text(lacking)}; "
                    "create the same compressors in the same order on every rank"
                )
        for number, one in sorted(self._waiting.items()):
            rows = [table.get(number) for _, table in tables]
            if all(row == rows[0] for row in rows):
                one.agreed = True
            elif number in used and None not in rows:
                own = self._described[number]
                lenient = {each.name for each in own if each.if_different is not None}
                strict = [[entry for entry in row if entry[0] not in lenient] for row in rows]
                if any(row != strict[0] for row in strict):
                    _refuse(self._gather, ranks, strict, own)
                one.agreed = True
                _compare([each for each in own if each.if_different is not None], ranks, rows)


# --- messages ---


def _compare(settings, ranks, rows):
    """Call ``if_different`` of those settings that differ, of several that may."""
    tables = [{name: digest for name, digest, _ in row} for row in rows]
    for setting in settings:
        digests = [table.get(setting.name) for table in tables]
        others = [rank for rank, digest in zip(ranks, digests) if digest != digests[0]]
        if others:
            setting.if_different(others)


def _refuse(gather, ranks, rows, own):
    """Raise InvalidArgumentError with the settings that differ."""
    tables = [{name: (digest, shown) for name, digest, shown in row} for row in rows]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    lists = {one.name: one.value for one in own if not isinstance(one.value, str)}
    # lists depend on the other settings and on each other, so report them last and only one
    differing = [name for name in differing if name not in lists] or differing[:1]
    found = []
    for name in differing[:_MOST_SHOWN]:
        shown = [table.get(name, ("", "nothing"))[1] for table in tables]
        if name in lists:
            name, shown = _first_difference(gather, name, lists[name])
        found.append(f"{name}={by_rank(ranks, shown)}")
    rest = f" (and {len(differing) - _MOST_SHOWN} more)" if len(differing) > _MOST_SHOWN else ""
    raise InvalidArgumentError(
        "expected the same compressor configuration on every rank, at the same step, got "
        f"{'; '.join(found)}{rest}; give every rank the "
        "same settings and named parameters, freeze the same ones, and load a state on "
        "all ranks or broadcast it"
    )


def _first_difference(gather, name, lines):
    """Find the first line of a list in which ranks differ; called on all ranks.

    Returns:
        A name for the line, and the list of its texts on each rank.
    """
    checksums = b"".join(
        struct.pack("<I", zlib.crc32(line.encode(errors="backslashreplace"))) for line in lines
    )
    parts = gather(checksums)
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
        part.decode(errors="replace") for part in gather(short(line).encode())
    ]


def _ordinal(number):
    teens = number % 100 in (10, 11, 12)
    ending = "th" if teens else {0: "st", 1: "nd", 2: "rd"}.get(number % 10, "th")
    return f"{number + 1}{ending}"
