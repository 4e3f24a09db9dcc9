"""RawIndex: 32-bit indices in any order."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register


@register
class RawIndex(IndexCodec):
    """Index codec that stores four bytes per index.

    This is the key half of the ⟨key, value⟩ pairs that other codecs are compared with.

    >>> RawIndex().encode(np.array([1, 7], dtype=np.uint32), d=9, key=0)[0].hex()
    '0100000007000000'
    """

    stage_id = 1
    any_order = True

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        return indices.astype("<u4").tobytes(), indices, False

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        if len(section) != 4 * count:
            raise CorruptPayloadError(
                f"index section: expected {4 * count} bytes, got {len(section)}"
            )
        indices = np.frombuffer(section, dtype="<u4").astype(np.uint32)
        if count and int(indices.max()) >= d:
            raise CorruptPayloadError(
                f"index section: expected an index below d = {d}, got {int(indices.max())}"
            )
        distinct, times = np.unique(indices, return_counts=True)
        if distinct.size != count:
            twice = distinct[times > 1][0]
            raise CorruptPayloadError(
                f"index section: expected distinct indices, got {twice} twice"
            )
        return indices
