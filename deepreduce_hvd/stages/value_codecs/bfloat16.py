"""BFloat16: float32 without its lower 16 bits."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register


@register
class BFloat16(ValueCodec):
    """Value codec that stores two bytes per value, with the range of float32.

    Values are rounded to nearest even and saturate at the largest finite bfloat16 value.

    >>> BFloat16().encode(np.array([1.0, 1.01], dtype=np.float32), key=0)[1]
    array([1.       , 1.0078125], dtype=float32)
    """

    stage_id = 3

    def bits_per_value(self) -> float:
        return 16.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        bits = values.astype("<f4").view(np.uint32)
        rounded = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        magnitude = np.minimum(rounded & np.uint32(0x7FFF), np.uint32(0x7F7F))
        halves = (((bits >> np.uint32(16)) & np.uint32(0x8000)) | magnitude).astype("<u2")
        return halves.tobytes(), _to_float(halves), None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        if len(section) != 2 * count:
            raise CorruptPayloadError(
                f"value section: expected {2 * count} bytes, got {len(section)}"
            )
        values = _to_float(np.frombuffer(section, dtype="<u2"))
        if not np.isfinite(values).all():
            raise CorruptPayloadError(
                "value section: expected finite bfloat16 values, got NaN or Inf"
            )
        return values


def _to_float(halves):
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
