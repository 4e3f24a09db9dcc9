"""RLE: run lengths of the bitmap."""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numerics import varint
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register


@register
class RLE(IndexCodec):
    """Index codec that stores the run lengths of the d-bit bitmap as LEB128 numbers.

    The source is the run-length encoding of indices in DeepReduce. Runs of unset and set bits
    alternate. A run that cannot be empty is stored as its length minus one. The unset bits after
    the last set bit are not sent.

    >>> RLE().encode(np.array([1, 2, 7], dtype=np.uint32), d=9, key=0)[0].hex()
    '01010300'
    """

    stage_id = 3

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        wide = indices.astype(np.int64)
        starts = np.flatnonzero(np.diff(wide, prepend=-2) != 1)
        set_runs = np.diff(starts, append=wide.size)
        unset_runs = np.diff(wide[starts], prepend=0)
        unset_runs[1:] -= set_runs[:-1]
        numbers = np.empty(2 * starts.size, dtype=np.int64)
        numbers[0::2] = unset_runs - (np.arange(starts.size) > 0)
        numbers[1::2] = set_runs - 1
        return varint.encode(numbers).tobytes(), indices, False

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        numbers = varint.decode(np.frombuffer(section, dtype=np.uint8), "index section")
        if numbers.size % 2:
            raise CorruptPayloadError(
                f"index section: expected pairs of runs, got {numbers.size} runs"
            )
        unset_runs = numbers[0::2] + np.uint64(1)
        unset_runs[:1] -= np.uint64(1)
        set_runs = numbers[1::2] + np.uint64(1)
        # there are at most d/2 pairs of at most 2^35 each, so the sums cannot overflow
        if (
            numbers.size > d + 1
            or int(set_runs.sum()) != count
            or int(set_runs.sum() + unset_runs.sum()) > d
        ):
            raise CorruptPayloadError(
                f"index section: expected runs of {count} set bits within d = {d}, got "
                f"{int(set_runs.sum())}"
            )
        first = np.cumsum(unset_runs + set_runs) - set_runs
        within = np.arange(count, dtype=np.uint64) - np.repeat(
            np.cumsum(set_runs) - set_runs, set_runs.astype(np.int64)
        )
        return (np.repeat(first, set_runs.astype(np.int64)) + within).astype(np.uint32)
