"""Packed bit fields in NumPy, least significant bit first within little-endian bytes.

The tests compare csrc/support/bits.h with this file.
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError


def bit_width_of(count):
    """Return the number of bits that distinguish ``count`` items: ceil(log2(count)), at least 0.

    >>> [bit_width_of(n) for n in (0, 1, 2, 3, 4, 5, 368)]
    [0, 0, 1, 2, 2, 3, 9]
    """
    return max(int(count) - 1, 0).bit_length()


def pack_fields(values, width):
    """Pack fields of ``width`` bits into ceil(n * width / 8) bytes, zero-padded.

    Args:
        values: (n,) integers below 2^width.
        width: bits per field.
    """
    values = np.asarray(values, dtype=np.uint64)
    if width == 0 or values.size == 0:
        return b""
    bits = (values[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def unpack_fields(data, count, width, section="section"):
    """Unpack ``count`` fields of ``width`` bits.

    Args:
        data: bytes of exactly the needed length, with zero padding.
        count: the number of fields.
        width: bits per field.
        section: the name of the data, for error messages.

    Returns:
        (count,) uint32.

    Raises:
        CorruptPayloadError: ``data`` has another length, or its padding is not zero.
    """
    expected = (count * width + 7) // 8
    if len(data) != expected:
        raise CorruptPayloadError(f"{section}: expected {expected} bytes, got {len(data)}")
    if width == 0 or count == 0:
        return np.zeros(count, dtype=np.uint32)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise CorruptPayloadError(f"{section}: expected zero padding, got bits that are set")
    fields = bits[: count * width].reshape(count, width).astype(np.uint64)
    return (
        (fields << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64).astype(np.uint32)
    )


def pack_varied(values, widths):
    """Pack fields of different widths into bytes, zero-padded.

    Args:
        values: (n,) integers, each below 2 to the power of its width.
        widths: (n,) bits per field, at most 32 each.

    >>> pack_varied([1, 3, 1], [1, 4, 4]).hex()
    '2700'
    """
    values = np.asarray(values, dtype=np.uint64).reshape(-1, 1)
    places = np.arange(32, dtype=np.uint64)
    used = places < np.asarray(widths, dtype=np.uint64).reshape(-1, 1)
    bits = (values >> places) & np.uint64(1)
    return np.packbits(bits[used].astype(np.uint8), bitorder="little").tobytes()


def unpack_varied(data, widths, section="section"):
    """Unpack fields of different widths.

    Args:
        data: bytes of exactly the needed length, with zero padding.
        widths: (n,) bits per field, at most 32 each.
        section: the name of the data, for error messages.

    Returns:
        (n,) int64.

    Raises:
        CorruptPayloadError: ``data`` has another length, or its padding is not zero.
    """
    widths = np.asarray(widths, dtype=np.uint64).reshape(-1, 1)
    filled = int(widths.sum())
    if len(data) != (filled + 7) // 8:
        raise CorruptPayloadError(
            f"{section}: expected {(filled + 7) // 8} bytes of fields, got {len(data)}"
        )
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[filled:].any():
        raise CorruptPayloadError(f"{section}: expected zero padding, got bits that are set")
    places = np.arange(32, dtype=np.int64)
    fields = np.zeros((widths.shape[0], 32), dtype=np.int64)
    fields[places < widths.astype(np.int64)] = bits[:filled]
    return (fields << places).sum(axis=1)
