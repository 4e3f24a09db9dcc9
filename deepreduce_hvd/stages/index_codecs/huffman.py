"""Huffman: the bytes of indices, or of gaps between them, in a Huffman code."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.numerics import huffman_code, varint
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import expect_empty

BLOCK = 4096
_STATIC, _DELTA = 0, 1
_LAST_OF_NUMBER = np.arange(huffman_code.SYMBOLS) < 0x80


def static_lengths(d):
    """Return code lengths for the four bytes of all indices from 0 to d−1 together.

    Both sides can compute them from d.
    """
    symbols = np.arange(huffman_code.SYMBOLS)
    frequencies = np.zeros(huffman_code.SYMBOLS, dtype=np.int64)
    for byte in range(4):
        unit = 1 << 8 * byte
        whole, rest = divmod(d, unit << 8)
        frequencies += whole * unit + np.clip(rest - symbols * unit, 0, unit)
    return huffman_code.code_lengths(frequencies)


def _expect(condition, message):
    if not condition:
        raise CorruptPayloadError(f"index section: expected {message}")


@register
class Huffman(IndexCodec):
    """Index codec that stores the bytes of indices in a Huffman code.

    Indices are encoded in blocks of 4096.

    Args:
        delta: False encodes the four bytes of each index in a static code that depends only on d
            (DeepReduce). True encodes the gaps between indices as LEB128 numbers, in a code that is
            stored in the section (delta-binary keys of SKCompress).

    Raises:
        InvalidArgumentError: ``delta`` is not True or False.

    >>> Huffman().encode(np.array([1, 7], dtype=np.uint32), d=9, key=0)[0].hex()
    '008103'
    """

    stage_id = 4

    def __init__(self, delta: bool = False) -> None:
        if delta not in (False, True):
            raise InvalidArgumentError(f"Huffman delta: expected True or False, got {delta!r}")
        self.delta = bool(delta)

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (float(self.delta),)

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        if indices.size == 0:
            return b"", indices, False
        starts_at = np.concatenate([[0], indices.astype(np.int64) + 1])
        numbers = indices.astype(np.int64) - starts_at[:-1]
        blocks = range(0, indices.size, BLOCK)
        if self.delta:
            symbols = [varint.encode(numbers[at : at + BLOCK]) for at in blocks]
            lengths = huffman_code.code_lengths(
                np.bincount(np.concatenate(symbols), minlength=huffman_code.SYMBOLS)
            )
            head = huffman_code.pack_lengths(lengths)
        else:
            symbols = [indices[at : at + BLOCK].astype("<u4").view(np.uint8) for at in blocks]
            lengths = static_lengths(d)
            head = b""
        coded = [huffman_code.encode(block, lengths) for block in symbols]
        starts = np.cumsum([len(data) for data in coded])[:-1]
        if self.delta:
            directory = np.stack([starts_at[BLOCK : BLOCK * len(coded) : BLOCK], starts], axis=1)
        else:
            directory = starts
        return (
            bytes([self.delta]) + head + directory.astype("<u4").tobytes() + b"".join(coded),
            indices,
            False,
        )

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        if count == 0:
            expect_empty(section, "index")
            return np.zeros(0, dtype=np.uint32)
        _expect(
            section and section[0] in (_STATIC, _DELTA),
            f"kind 0 or 1, got {section[:1].hex() or 'no bytes'}",
        )
        delta = section[0] == _DELTA
        blocks = -(-count // BLOCK)
        at = 1
        if delta:
            at += huffman_code.SYMBOLS // 2
            _expect(len(section) >= at, f"at least {at} bytes, got {len(section)}")
            lengths = huffman_code.unpack_lengths(section[1:at])
            huffman_code.codes(lengths)
        else:
            lengths = static_lengths(d)
        fields = 2 if delta else 1
        end = at + 4 * fields * (blocks - 1)
        _expect(len(section) >= end, f"at least {end} bytes, got {len(section)}")
        directory = np.frombuffer(section[at:end], dtype="<u4").reshape(blocks - 1, fields)
        data = section[end:]
        starts = [0, *directory[:, -1].tolist(), len(data)]
        pieces = []
        before = 0
        for block in range(blocks):
            n = min(BLOCK, count - block * BLOCK)
            _expect(
                starts[block] <= starts[block + 1] <= len(data),
                f"block {block} within {len(data)} bytes, got {starts[block : block + 2]}",
            )
            block_data = data[starts[block] : starts[block + 1]]
            if delta:
                start = int(directory[block - 1, 0]) if block else 0
                _expect(start == before, f"block {block} to start at {before}, got {start}")
                symbols = huffman_code.decode(
                    block_data, lengths, n, "index section", _LAST_OF_NUMBER
                )
                indices = (
                    np.cumsum(varint.decode(symbols, "index section") + np.uint64(1))
                    + np.uint64(before)
                    - np.uint64(1)
                )
            else:
                symbols = huffman_code.decode(block_data, lengths, 4 * n, "index section")
                indices = symbols.view("<u4").astype(np.uint64)
                previous = np.concatenate([[before - 1], indices[:-1].astype(np.int64)])
                (wrong,) = np.nonzero(indices.astype(np.int64) <= previous)
                _expect(
                    not wrong.size,
                    f"ascending indices, got {indices[wrong[:1]]} after {previous[wrong[:1]]}",
                )
            _expect(int(indices[-1]) < d, f"an index below d = {d}, got {int(indices[-1])}")
            before = int(indices[-1]) + 1
            pieces.append(indices.astype(np.uint32))
        return np.concatenate(pieces)
