"""Bitmap: one bit per element."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register


@register
class Bitmap(IndexCodec):
    """Index codec that stores a bitmap of d bits, one per element.

    A bit is set if its element is sent. For indices that are spread uniformly, Bitmap is the
    smallest index section when k/d is more than about 0.4. Below that, :class:`Rice` is the
    smallest.

    >>> Bitmap().encode(np.array([1, 7], dtype=np.uint32), d=9, key=0)[0].hex()
    '8200'
    """

    stage_id = 2

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        bits = np.zeros(d, dtype=np.uint8)
        bits[indices] = 1
        return np.packbits(bits, bitorder="little").tobytes(), indices, False

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        if len(section) != (d + 7) // 8:
            raise CorruptPayloadError(
                f"index section: expected {(d + 7) // 8} bytes, got {len(section)}"
            )
        bits = np.unpackbits(np.frombuffer(section, dtype=np.uint8), bitorder="little")
        indices = np.flatnonzero(bits)
        if indices.size != count or bits[d:].any():
            raise CorruptPayloadError(
                f"index section: expected {count} set bits below d = {d}, got {indices.size}"
            )
        return indices.astype(np.uint32)
