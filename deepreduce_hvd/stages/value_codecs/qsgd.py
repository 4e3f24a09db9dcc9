"""QSGD: stochastic quantization in buckets of values, which are not buckets of gradients."""

import math
import struct

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.numerics.bits import pack_fields, unpack_fields
from deepreduce_hvd.numerics.random import random_uniform
from deepreduce_hvd.stages.base import ValueCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import unpack_header

_HEAD = struct.Struct("<BH")
_LANES = 8
_NORMS = ("max", "l2")


def _levels(bits):
    """Return the number of quantization levels of a magnitude, s in the paper."""
    return max(2 ** (bits - 1) - 1, 1)


def _decode_table(bits):
    """Return a float32 array that maps each code to a multiple of the bucket's norm."""
    if bits == 1:
        return np.array([-1, 1], dtype=np.float32)
    magnitudes = np.arange(_levels(bits) + 1, dtype=np.float32) / np.float32(_levels(bits))
    return np.concatenate([magnitudes, -magnitudes])


@register
class QSGD(ValueCodec):
    """Value codec that quantizes values to ``bits`` bits (Alistarh et al. 2017, section 3).

    The values of a bucket share one norm. One bit is the sign. The other bits are one of s + 1 =
    2^(bits−1) levels: abs(value) / norm is rounded at random to one of the two nearest levels. The
    expected decoded value is the value itself (unbiased). With ``bits=1``, a value becomes plus or
    minus the norm.

    Args:
        bits: bits per value, from 1 to 8.
        bucket: the number of values that share a norm; a multiple of 8, at most 32768. The paper
            uses 512.
        norm: "max" is the largest magnitude and has lower variance. "l2" is the norm in the
            analysis of the paper.

    Raises:
        InvalidArgumentError: an argument is not one of the values above.

    >>> QSGD(bits=2).encode(np.array([-2, 2, 0], dtype=np.float32), key=0)[1]
    array([-2.,  2.,  0.], dtype=float32)
    """

    stage_id = 5

    def __init__(self, bits: int = 4, bucket: int = 512, norm: str = "max") -> None:
        self.bits = expect_integer(
            "QSGD bits", bits, "an integer of 1 to 8", range(1, 9).__contains__
        )
        self.bucket = expect_integer(
            "QSGD bucket", bucket, "a multiple of 8 in 8 to 32768", range(8, 32769, 8).__contains__
        )
        if norm not in _NORMS:
            raise InvalidArgumentError(
                f"QSGD norm: expected one of {', '.join(_NORMS)}, got {norm!r}"
            )
        self.norm = norm

    @property
    def sends_zeros(self) -> bool:
        return self.bits > 1

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.bits, self.bucket, _NORMS.index(self.norm))

    def bits_per_value(self) -> float:
        return self.bits + 32.0 / self.bucket

    def relative_error(self) -> float:
        # Stochastic rounding between two levels that are h apart has variance r (h - r), where r is
        # the distance to the lower level. First estimate: exponentially distributed magnitudes,
        # with mean 1 and mean square 2. Second: equal magnitudes of 1, as the largest of a tensor
        # nearly are; with the max norm, these are exact.
        exponential = math.log(self.bucket) + np.euler_gamma
        if self.norm == "l2":
            exponential = math.sqrt(2 * self.bucket)
        if self.bits == 1:
            return math.sqrt(exponential**2 / 2 - 1)
        h = exponential / _levels(self.bits)
        tail = 1 / math.expm1(h)
        mean, mean_square = 1 - h * tail, 2 - (h**2 + 2 * h) * tail
        variance = (h * mean - mean_square) / 2
        if self.norm == "l2":
            h = math.sqrt(self.bucket) / _levels(self.bits)
            variance = max(variance, 1 % h * (h - 1 % h))
        return math.sqrt(variance)

    def _norms(self, buckets):
        if self.norm == "max":
            return np.abs(buckets).max(axis=1, initial=0)
        # sum in a fixed order, 8 lanes and then halves, so that the result is the same everywhere
        lanes = np.square(buckets.astype(np.float64)).reshape(
            len(buckets), self.bucket // _LANES, _LANES
        )
        lanes = np.add.accumulate(lanes, axis=1)[:, -1]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        return np.minimum(np.sqrt(lanes[:, 0]), np.finfo(np.float32).max).astype(np.float32)

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        count = values.size
        padded = np.zeros(-(-count // self.bucket) * self.bucket, dtype=np.float32)
        padded[:count] = values
        buckets = padded.reshape(-1, self.bucket)
        norms = self._norms(buckets)
        safe = np.where(norms > 0, norms, np.float32(1))[:, None]
        uniform = random_uniform(key, np.arange(padded.size)).reshape(buckets.shape)
        levels = np.float32(_levels(self.bits))
        if self.bits == 1:
            codes = np.floor((buckets / safe + np.float32(1)) * np.float32(0.5) + uniform).astype(
                np.uint8
            )
            codes = np.minimum(codes, np.uint8(1))
        else:
            ratio = (np.abs(buckets) / safe) * levels
            codes = np.minimum(np.floor(ratio + uniform), levels).astype(np.uint8)
            codes |= (np.signbit(buckets) << (self.bits - 1)).astype(np.uint8)
        codes = np.where(norms[:, None] > 0, codes, np.uint8(0)).ravel()[:count]
        decoded = (_decode_table(self.bits)[codes] * np.repeat(norms, self.bucket)[:count]).astype(
            np.float32
        )
        section = (
            _HEAD.pack(self.bits, self.bucket)
            + norms.astype("<f4").tobytes()
            + pack_fields(codes, self.bits)
        )
        return section, decoded, None

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        bits, bucket = unpack_header(_HEAD, section, "value")
        if bits not in range(1, 9) or bucket not in range(8, 32769, 8):
            raise CorruptPayloadError(
                "value section: expected 1 to 8 bits in buckets of a multiple of 8 up to "
                f"32768, got {bits} and {bucket}"
            )
        buckets = -(-count // bucket)
        at = _HEAD.size + 4 * buckets
        norms = np.frombuffer(
            section[_HEAD.size : at],
            dtype="<f4",
            count=min(buckets, (len(section) - _HEAD.size) // 4),
        )
        if norms.size != buckets:
            raise CorruptPayloadError(f"value section: expected {buckets} norms, got {norms.size}")
        wrong = norms[~np.isfinite(norms) | np.signbit(norms)]
        if wrong.size:
            raise CorruptPayloadError(
                f"value section: expected finite norms of at least 0, got {wrong[0]}"
            )
        codes = unpack_fields(section[at:], count, bits, "value section")
        return (_decode_table(bits)[codes] * np.repeat(norms, bucket)[:count]).astype(np.float32)
