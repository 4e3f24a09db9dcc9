"""The container format of docs/format.md in Python.

This is the only Python file that knows the byte offsets, the version and the limits.
"""

import dataclasses
import itertools
import struct

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError

MAGIC = b"DRHV"
VERSION = 1
HEADER = struct.Struct("<4sBBBBBBHIIIIIQ")
_START = MAGIC + bytes([VERSION])
_FLAGS, _LENGTHS = 5, slice(20, 32)  # of a header: the flags, and the sizes of the sections
MAX_ELEMENTS = 2**31 - 1
MAX_SECTION = 2**32 - 1

NON_FINITE = 1
ASCENDING, PERMUTATION, INDICES_IN_VALUE_ORDER = 0, 1, 2

#: {name of a gradient's dtype: code}
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}


@dataclasses.dataclass
class Payload:
    """The fields of one payload; its sections are bytes."""

    d: int
    count: int
    dtype: int = 0
    flags: int = 0
    index_id: int = 0
    value_id: int = 0
    order: int = ASCENDING
    index: bytes = b""
    values: bytes = b""
    order_map: bytes = b""

    def total_bytes(self):
        return HEADER.size + len(self.index) + len(self.values) + len(self.order_map)


def checksum(data):
    """Return the 64-bit multilinear hash of ``data``, a uint8 array.

    The checksum field itself counts as zero.
    """
    words = np.zeros((data.size + 7) // 8 * 8, dtype=np.uint8)
    words[: data.size] = data
    words = words.view("<u8").copy()
    words[4] = 0
    with np.errstate(over="ignore"):
        x = np.arange(words.size, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
        return int(((words + np.uint64(1)) * x).sum(dtype=np.uint64))


def write(payload):
    """Return a :class:`Payload` as a uint8 array.

    Raises:
        InvalidArgumentError: a section is larger than 2^32 - 1 bytes.
    """
    sections = {"index": payload.index, "value": payload.values, "order": payload.order_map}
    for name, section in sections.items():
        if len(section) > MAX_SECTION:
            raise InvalidArgumentError(
                f"{name} section: expected at most {MAX_SECTION} bytes, got "
                f"{len(section)}; compress more or split the tensor"
            )

    def header(check):
        return HEADER.pack(
            MAGIC, VERSION, payload.flags, payload.index_id, payload.value_id, payload.dtype,
            payload.order, 0,
            payload.d, payload.count, len(payload.index), len(payload.values),
            len(payload.order_map), check,
        )  # fmt: skip

    body = b"".join(sections.values())
    check = checksum(np.frombuffer(header(0) + body, dtype=np.uint8))
    return np.frombuffer(header(check) + body, dtype=np.uint8).copy()


def codec_ids(data):
    """Return the ids of a payload's codecs, without any check.

    Args:
        data: (n,) uint8, which begins with the header.

    Returns:
        A tuple (id of the index codec, id of the value codec); zeros if there is no whole header.
    """
    if data.size < HEADER.size:
        return 0, 0
    _, _, _, index_id, value_id, *_ = HEADER.unpack(data[: HEADER.size].tobytes())
    return index_id, value_id


def read_header(data):
    """Read the header of a payload, (40,) uint8.

    A non-finite payload is only a header, and nobody decodes it. So all of it is checked here.

    Returns:
        A tuple (size of the whole payload in bytes, whether the payload is non-finite).

    Raises:
        CorruptPayloadError: the bytes are not the header of a payload.
    """
    if data.size != HEADER.size or data[:5].tobytes() != _START:
        raise CorruptPayloadError(
            f"payload header: expected {HEADER.size} bytes that start with "
            f"{MAGIC.hex(' ')} {VERSION:02x}, got {data.size}, "
            f"{data[:5].tobytes().hex(' ')}"
        )
    fields = HEADER.unpack(data.tobytes())
    non_finite = bool(fields[2] & NON_FINITE)
    if non_finite:
        read(data)
    return HEADER.size + sum(fields[10:13]), non_finite


def read_headers(headers):
    """Read the headers of several payloads, (n, 40) uint8, as :func:`read_header` does.

    Returns:
        A tuple (sizes of the payloads in bytes, (n,) int64; whether each is non-finite, (n,) bool).

    Raises:
        CorruptPayloadError: the bytes are not the headers of payloads.
    """
    non_finite = headers[:, _FLAGS] & NON_FINITE != 0
    wrong = (headers[:, : len(_START)] != np.frombuffer(_START, np.uint8)).any(axis=1)
    for header in headers[wrong | non_finite]:
        read_header(header)  # raises the error, if there is one
    lengths = np.ascontiguousarray(headers[:, _LENGTHS]).view("<u4").astype(np.int64)
    return HEADER.size + lengths.sum(axis=1), non_finite


def read(data):
    """Return a payload, given as a uint8 array, as a :class:`Payload`.

    All checks that need no decoding are made.

    Raises:
        CorruptPayloadError: a check failed.
    """
    data = np.ascontiguousarray(data, dtype=np.uint8)
    if data.size < HEADER.size:
        raise CorruptPayloadError(
            f"payload: expected at least {HEADER.size} bytes, got {data.size}"
        )
    raw = data.tobytes()
    magic, version, flags, index_id, value_id, dtype, order, reserved, d, count, *lengths, check = (
        HEADER.unpack_from(raw)
    )
    if magic != MAGIC:
        raise CorruptPayloadError(f"payload magic: expected {MAGIC.hex(' ')}, got {magic.hex(' ')}")
    if version != VERSION:
        raise CorruptPayloadError(f"payload version: expected {VERSION}, got {version}")
    if HEADER.size + sum(lengths) != data.size:
        raise CorruptPayloadError(
            f"payload length: expected {HEADER.size + sum(lengths)} bytes from the "
            f"header, got {data.size}"
        )
    got = checksum(data)
    if check != got:
        raise CorruptPayloadError(f"payload checksum: expected {check:016x}, got {got:016x}")
    ends = np.cumsum([HEADER.size, *lengths]).tolist()
    index, values, order_map = (raw[a:b] for a, b in itertools.pairwise(ends))
    for what, good, expected, value in (
        ("flags", flags <= NON_FINITE, "0 or 1", flags),
        ("dtype", dtype in DTYPES.values(), f"0 to {max(DTYPES.values())}", dtype),
        ("order", order <= INDICES_IN_VALUE_ORDER, "0 to 2", order),
        ("reserved bytes", reserved == 0, "0", reserved),
        (
            "order section",
            not order_map or order == PERMUTATION,
            f"0 bytes for order {order}",
            len(order_map),
        ),
        ("d", d <= MAX_ELEMENTS, f"at most {MAX_ELEMENTS}", d),
        ("count", count <= d, f"at most d = {d}", count),
    ):
        if not good:
            raise CorruptPayloadError(f"payload {what}: expected {expected}, got {value}")
    if flags & NON_FINITE:
        for expected, value, good in (
            ("no values", count, count == 0),
            (f"{HEADER.size} bytes without sections", len(raw), len(raw) == HEADER.size),
            ("the index codec 0", index_id, index_id == 0),
            ("the value codec 0", value_id, value_id == 0),
        ):
            if not good:
                raise CorruptPayloadError(f"non-finite payload: expected {expected}, got {value}")
    if not flags & NON_FINITE and index_id == 0 and count != d:
        raise CorruptPayloadError(f"payload without indices: expected count = d = {d}, got {count}")
    if index_id == 0 and index:
        raise CorruptPayloadError(
            f"payload without indices: expected an empty index section, got {len(index)} bytes"
        )
    if index_id == 0 and order == INDICES_IN_VALUE_ORDER:
        raise CorruptPayloadError(
            f"payload without indices: expected an order of at most {PERMUTATION}, got {order}"
        )
    return Payload(d, count, dtype, flags, index_id, value_id, order, index, values, order_map)
