"""Quantile: the quantile buckets of SketchML."""

import itertools
import struct

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics import huffman_code
from deepreduce_hvd.numerics.bits import bit_width_of, pack_fields, unpack_fields
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import unpack_header

BLOCK = 4096
_HEAD = struct.Struct("<HHB")
_FIXED, _HUFFMAN = 0, 1
#: The mean of a bucket takes 32 bits. With at least 8 values per bucket, the means cost at most 4
#: bits per value.
_VALUES_A_BUCKET = 8


def _buckets_of_sides(count, negatives, wanted):
    """Return the numbers of buckets for the negative values and for all other values.

    They are proportional to the numbers of values.
    """
    others = count - negatives
    total = max(min(wanted, -(-count // _VALUES_A_BUCKET)), (negatives > 0) + (others > 0))
    if negatives == 0 or others == 0:
        return (total, 0) if others == 0 else (0, total)
    for_negatives = min(max((total * negatives + count // 2) // count, 1), total - 1, negatives)
    return for_negatives, min(total - for_negatives, others)


@register
class Quantile(ValueCodec):
    """Value codec that replaces each value by the mean of its quantile bucket.

    All buckets hold nearly equal numbers of values. Negative values and other values have separate
    buckets, so signs never flip. Bucket numbers are stored in a Huffman code or at a fixed width,
    whichever is shorter. With ``Huffman(delta=True)`` as the index codec, this is SKCompress
    without its MinMaxSketch. Source: quantile-bucket quantification in SketchML (Jiang et al.
    2018).

    Args:
        buckets: the total number of buckets, from 2 to 256. Fewer are used if there would be fewer
            than 8 values per bucket.

    Raises:
        InvalidArgumentError: ``buckets`` is not an integer of 2 to 256.

    >>> Quantile(buckets=2).encode(np.array([-1, -3, 5, 7], dtype=np.float32), key=0)[1]
    array([-2., -2.,  6.,  6.], dtype=float32)
    """

    stage_id = 8

    def __init__(self, buckets: int = 256) -> None:
        self.buckets = expect_integer(
            "Quantile buckets", buckets, "an integer of 2 to 256", range(2, 257).__contains__
        )

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.buckets,)

    def bits_per_value(self) -> float:
        return float(bit_width_of(self.buckets))

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        count = values.size
        ascending = np.argsort(values, kind="stable")
        negatives = int((values < 0).sum())
        sides = _buckets_of_sides(count, negatives, self.buckets)
        found: list[np.float32] = []
        symbols = np.zeros(count, dtype=np.uint8)
        for first, n, buckets in (
            (0, negatives, sides[0]),
            (negatives, count - negatives, sides[1]),
        ):
            edges = [first + j * n // buckets for j in range(buckets + 1)] if buckets else []
            for start, end in itertools.pairwise(edges):
                symbols[ascending[start:end]] = len(found)
                # a running sum has a fixed order; np.sum does not
                total = np.add.accumulate(values[ascending[start:end]].astype(np.float64))[-1]
                found.append(np.float32(total / (end - start)))
        means = np.array(found, dtype=np.float32)
        width = bit_width_of(means.size)
        lengths = huffman_code.code_lengths(np.bincount(symbols, minlength=huffman_code.SYMBOLS))
        coded = [
            huffman_code.encode(symbols[at : at + BLOCK], lengths) for at in range(0, count, BLOCK)
        ]
        starts = np.cumsum([len(data) for data in coded])[:-1].astype("<u4")
        huffman = huffman_code.pack_lengths(lengths) + starts.tobytes() + b"".join(coded)
        fixed = pack_fields(symbols, width)
        kind = _HUFFMAN if len(huffman) < len(fixed) else _FIXED
        section = (
            _HEAD.pack(*sides, kind)
            + means.astype("<f4").tobytes()
            + (huffman if kind == _HUFFMAN else fixed)
        )
        return section, means[symbols] if count else values, None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        *sides, kind = unpack_header(_HEAD, section, "value")
        total = sum(sides)
        if count == 0 and (total != 0 or kind != _FIXED):
            raise CorruptPayloadError(
                f"value section: expected 0 buckets coded as 0, got {total} coded as {kind}"
            )
        if count != 0 and (not 1 <= total <= 256 or kind > _HUFFMAN):
            raise CorruptPayloadError(
                f"value section: expected 1 to 256 buckets coded as 0 or 1, got {total} "
                f"coded as {kind}"
            )
        at = _HEAD.size + 4 * total
        if len(section) < at:
            raise CorruptPayloadError(
                f"value section: expected {total} means, got {len(section) - _HEAD.size} bytes"
            )
        means = np.frombuffer(section[_HEAD.size : at], dtype="<f4").astype(np.float32)
        if not np.isfinite(means).all():
            raise CorruptPayloadError(
                f"value section: expected finite means, got {means[~np.isfinite(means)][0]}"
            )
        data = section[at:]
        if kind == _FIXED:
            symbols = unpack_fields(data, count, bit_width_of(total), "value section")
        else:
            symbols = cls._decode_huffman(data, count)
        if count and int(symbols.max()) >= total:
            raise CorruptPayloadError(
                f"value section: expected buckets below {total}, got {int(symbols.max())}"
            )
        return means[symbols] if count else np.zeros(0, dtype=np.float32)

    @staticmethod
    def _decode_huffman(data, count):
        blocks = -(-count // BLOCK)
        head = huffman_code.SYMBOLS // 2
        end = head + 4 * max(blocks - 1, 0)
        if len(data) < end or count == 0:
            raise CorruptPayloadError(
                f"value section: expected at least {end} bytes of Huffman codes, got {len(data)}"
            )
        lengths = huffman_code.unpack_lengths(data[:head])
        huffman_code.codes(lengths)
        starts = [0, *np.frombuffer(data[head:end], dtype="<u4").tolist(), len(data) - end]
        pieces = []
        for block in range(blocks):
            if not starts[block] <= starts[block + 1] <= len(data) - end:
                raise CorruptPayloadError(
                    f"value section: expected block {block} within {len(data) - end} "
                    f"bytes, got {starts[block : block + 2]}"
                )
            n = min(BLOCK, count - block * BLOCK)
            pieces.append(
                huffman_code.decode(
                    data[end + starts[block] : end + starts[block + 1]], lengths, n, "value section"
                )
            )
        return np.concatenate(pieces)
