"""The messages of the handshake: descriptions of compressors, gathered from all ranks.

Descriptions from other ranks are text of limited length. They are only compared and shown.
"""

import json
import struct

import numpy as np

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.errors import CorruptPayloadError

_FRAME = struct.Struct("<4sI")  # magic, length of the part that follows
_MAGIC = b"DRHS"
_LONGEST_TEXT = 300


class Gather:
    """Gather one byte string from each rank.

    The collectives have the same names in every handshake, so a rank that has missed one handshake
    can take part in the next.
    """

    def __init__(self, transport):
        self._transport = transport
        self._calls = 0

    def __call__(self, own):
        return self.result(self.start(own))

    def start(self, own):
        """Start a gather of ``own`` and return its handle."""
        message = np.frombuffer(_FRAME.pack(_MAGIC, len(own)) + own, dtype=np.uint8)
        name = f"deepreduce.handshake.{self._calls}"
        self._calls += 1
        return self._transport.allgather(message, name)

    def result(self, handle):
        """Return the parts of all ranks, in rank order."""
        gathered = bytes(self._transport.wait(handle))
        parts, start = [], 0
        for rank in self._transport.ranks:
            if len(gathered) - start < _FRAME.size:
                raise CorruptPayloadError(
                    f"handshake: expected a message from rank {rank}, got "
                    f"{len(gathered) - start} bytes"
                )
            magic, length = _FRAME.unpack_from(gathered, start)
            start += _FRAME.size
            if magic != _MAGIC or length > len(gathered) - start:
                raise CorruptPayloadError(
                    f"handshake: expected a message from rank {rank}, got {magic!r} and a "
                    f"length of {length}"
                )
            parts.append(gathered[start : start + length])
            start += length
        if start != len(gathered):
            raise CorruptPayloadError(f"handshake: expected {start} bytes, got {len(gathered)}")
        return parts


def pack(number, described):
    table = {
        key: [[one.name, one.digest, one.shown] for one in settings]
        for key, settings in described.items()
    }
    return json.dumps([number, table]).encode()


def unpack(rank, part):
    """Read the description of one rank.

    Returns:
        The number of the compressor in use or None, and {number: [[name, digest, shown], ...]}.
    """
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
            f"handshake: expected a description from rank {rank}, got "
            f"{short(repr(part))} ({short(str(error))})"
        ) from None
    return number, table


def short(text):
    """Return text on one line, in printable ASCII characters, shortened if it is long."""
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def by_rank(ranks, texts):
    """Join texts with the ranks that have them, as in ``1024 on ranks 0, 2 and 512 on rank 1``."""
    having: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts):
        having.setdefault(short(text), []).append(rank)
    return " and ".join(f"{text} on {ranks_text(some)}" for text, some in having.items())
