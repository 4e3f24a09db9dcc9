"""Float16: IEEE half precision."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register


@register
class Float16(ValueCodec):
    """Value codec that stores two bytes per value, in IEEE half precision.

    Values are rounded to nearest even and saturate at ±65504. The rounding error stays in the
    residual.

    >>> Float16().encode(np.array([1.0, 1e6], dtype=np.float32), key=0)[1]
    array([1.0000e+00, 6.5504e+04], dtype=float32)
    """

    stage_id = 2

    def bits_per_value(self) -> float:
        return 16.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        halves = np.clip(values, -65504, 65504).astype("<f2")
        return halves.tobytes(), halves.astype(np.float32), None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        if len(section) != 2 * count:
            raise CorruptPayloadError(
                f"value section: expected {2 * count} bytes, got {len(section)}"
            )
        values = np.frombuffer(section, dtype="<f2").astype(np.float32)
        if not np.isfinite(values).all():
            raise CorruptPayloadError(
                "value section: expected finite float16 values, got NaN or Inf"
            )
        return values
