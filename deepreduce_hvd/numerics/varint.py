"""Unsigned LEB128: 7 bits per byte, least significant first.

The top bit is set in all bytes of a number but the last. Numbers must not be longer than needed.
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError

LONGEST = 5


def encode(numbers):
    """Encode numbers (n,) below 2^32 as an array of bytes, uint8."""
    numbers = np.asarray(numbers, dtype=np.uint64)
    lengths = np.ones(numbers.size, dtype=np.int64)
    for more in range(1, LONGEST):
        lengths += numbers >= np.uint64(1) << np.uint64(7 * more)
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if numbers.size else 0, dtype=np.uint8)
    for byte in range(LONGEST):
        longer = lengths > byte
        group = (numbers[longer] >> np.uint64(7 * byte)) & np.uint64(0x7F)
        goes_on = np.where(lengths[longer] > byte + 1, np.uint64(0x80), np.uint64(0))
        out[ends[longer] - lengths[longer] + byte] = group | goes_on
    return out


def decode(data, section="section"):
    """Decode all numbers in an array of bytes, (n,) uint8, to uint64.

    Raises:
        CorruptPayloadError: the data ends within a number, or a number is longer than needed or
            than 5 bytes.
    """
    ends = np.flatnonzero(data < 0x80) + 1
    if data.size and (ends.size == 0 or ends[-1] != data.size):
        raise CorruptPayloadError(f"{section}: expected a complete number, got the end of the data")
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if ends.size else ends
    lengths = ends - starts
    wrong = lengths[(lengths > LONGEST) | ((lengths > 1) & (data[ends - 1] == 0))]
    if wrong.size:
        got = f"more than {LONGEST}" if wrong[0] > LONGEST else wrong[0]
        raise CorruptPayloadError(
            f"{section}: expected numbers of at most {LONGEST} bytes, no longer than needed, got"
            f" one of {got} bytes"
        )
    numbers = np.zeros(ends.size, dtype=np.uint64)
    for byte in range(LONGEST):
        longer = lengths > byte
        numbers[longer] |= (
            data[starts[longer] + byte].astype(np.uint64) & np.uint64(0x7F)
        ) << np.uint64(7 * byte)
    return numbers
