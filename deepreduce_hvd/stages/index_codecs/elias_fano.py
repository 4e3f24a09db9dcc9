"""EliasFano: low bits stored directly, high bits as a bitmap."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics.bits import pack_fields, unpack_fields
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import expect_empty


def _low_width(d, count):
    """Return floor(log2(d / count)), at least 0."""
    return max((d // count).bit_length() - 1, 0)


@register
class EliasFano(IndexCodec):
    """Index codec with the Elias-Fano code of monotone sequences (Elias 1974, Fano 1971).

    The code is quasi-succinct: it needs at most 2 + log2(d/k) bits per index. It has no state from
    one index to the next. A decoder finds every part by counting set bits, so the code suits
    parallel decoders.

    >>> EliasFano().encode(np.array([1, 7], dtype=np.uint32), d=9, key=0)[0].hex()
    '0d05'
    """

    stage_id = 6

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        count = indices.size
        if count == 0:
            return b"", indices, False
        width = _low_width(d, count)
        low = pack_fields(indices & np.uint32((1 << width) - 1), width)
        high = np.zeros(count + ((d - 1) >> width) + 1, dtype=np.uint8)
        high[(indices >> np.uint32(width)).astype(np.int64) + np.arange(count)] = 1
        return low + np.packbits(high, bitorder="little").tobytes(), indices, False

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        if count == 0:
            expect_empty(section, "index")
            return np.zeros(0, dtype=np.uint32)
        width = _low_width(d, count)
        low_bytes = (count * width + 7) // 8
        high_bits = count + ((d - 1) >> width) + 1
        expected = low_bytes + (high_bits + 7) // 8
        if len(section) != expected:
            raise CorruptPayloadError(
                f"index section: expected {expected} bytes, got {len(section)}"
            )
        low = unpack_fields(section[:low_bytes], count, width, "index section").astype(np.uint64)
        ones = np.flatnonzero(
            np.unpackbits(np.frombuffer(section[low_bytes:], dtype=np.uint8), bitorder="little")
        )
        if ones.size != count or int(ones[-1]) >= high_bits:
            raise CorruptPayloadError(
                f"index section: expected {count} set bits in {high_bits}, got {ones.size}"
            )
        indices = ((ones - np.arange(count)).astype(np.uint64) << np.uint64(width)) | low
        (wrong,) = np.nonzero(indices[1:] <= indices[:-1])
        if wrong.size:
            first, second = indices[wrong[0] : wrong[0] + 2]
            raise CorruptPayloadError(
                f"index section: expected ascending indices, got {first} followed by {second}"
            )
        if int(indices[-1]) >= d:
            raise CorruptPayloadError(
                f"index section: expected indices below d = {d}, got {indices[-1]}"
            )
        return indices.astype(np.uint32)
