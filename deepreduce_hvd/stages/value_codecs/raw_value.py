"""RawValue: float32 values without compression."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register


@register
class RawValue(ValueCodec):
    """Value codec that stores four bytes per value, bit for bit.

    >>> RawValue().encode(np.array([1.0], dtype=np.float32), key=0)[0].hex()
    '0000803f'
    """

    stage_id = 1

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        return values.astype("<f4").tobytes(), values, None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        if len(section) != 4 * count:
            raise CorruptPayloadError(
                f"value section: expected {4 * count} bytes, got {len(section)}"
            )
        return np.frombuffer(section, dtype="<f4").astype(np.float32)
