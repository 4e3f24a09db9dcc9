"""Packed bit fields in NumPy: least significant bit first within little-endian bytes (the oracle of
csrc/bits.h).
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError


def bit_width_of(count):
    """The bits that tell ``count`` things apart: ceil(log2(count)), 0 for one or none.

    >>> [bit_width_of(n) for n in (0, 1, 2, 3, 4, 5, 368)]
    [0, 0, 1, 2, 2, 3, 9]
    """
    return max(int(count) - 1, 0).bit_length()


def pack_fields(values, width):
    """``values`` (n,) below 2^width as ceil(n * width / 8) bytes, zero-padded."""
    values = np.asarray(values, dtype=np.uint64)
    if width == 0 or values.size == 0:
        return b""
    bits = (values[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def unpack_fields(data, count, width, section="section"):
    """The ``count`` fields of ``width`` bits in ``data`` (bytes), which they must fill exactly,
    padding zero.
    """
    expected = (count * width + 7) // 8
    if len(data) != expected:
        raise CorruptPayloadError(f"{section}: expected {expected} bytes, got {len(data)}")
    if width == 0 or count == 0:
        return np.zeros(count, dtype=np.uint32)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise CorruptPayloadError(f"{section}: expected zero padding and the end of the bits")
    fields = bits[: count * width].reshape(count, width).astype(np.uint64)
    return (
        (fields << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64).astype(np.uint32)
    )


def pack_varied(values, widths):
    """``values`` (n,), each below 2 to the power of its own of ``widths`` (n,) <= 32, as bytes,
    zero-padded.

    >>> pack_varied([1, 3, 1], [1, 4, 4]).hex()
    '2700'
    """
    values = np.asarray(values, dtype=np.uint64).reshape(-1, 1)
    places = np.arange(32, dtype=np.uint64)
    used = places < np.asarray(widths, dtype=np.uint64).reshape(-1, 1)
    bits = (values >> places) & np.uint64(1)
    return np.packbits(bits[used].astype(np.uint8), bitorder="little").tobytes()


def unpack_varied(data, widths, section="section"):
    """The fields of ``widths`` (n,) bits in ``data`` (bytes) as (n,) int64; they must fill it
    exactly, padding zero.
    """
    widths = np.asarray(widths, dtype=np.uint64).reshape(-1, 1)
    filled = int(widths.sum())
    if len(data) != (filled + 7) // 8:
        raise CorruptPayloadError(
            f"{section}: expected {(filled + 7) // 8} bytes of fields, got {len(data)}"
        )
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[filled:].any():
        raise CorruptPayloadError(f"{section}: expected zero padding and the end of the bits")
    places = np.arange(32, dtype=np.int64)
    fields = np.zeros((widths.shape[0], 32), dtype=np.int64)
    fields[places < widths.astype(np.int64)] = bits[:filled]
    return (fields << places).sum(axis=1)
