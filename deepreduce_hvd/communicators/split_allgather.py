"""SplitAllgather: each rank sums one slice, and an allgather collects the slices."""

import math
from collections.abc import Generator
from typing import Any

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.base import Communicator, expect_choice
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sparse_sum import SparseSum, failed, merged
from deepreduce_hvd.communicators.sums import BucketSum, CompleteSum
from deepreduce_hvd.numpy_backend import decode_sum_sparse
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier
from deepreduce_hvd.stages.value_codecs import QSGD, LloydMax, RawValue

_BUCKET = 1024  # bucket of QSGD in dense slices, as in SparCML
_EXACT = Codec(NoneSparsifier(), RawIndex(), RawValue())
_NOTHING = np.zeros(0, dtype=np.uint8)


class SplitAllgather(Communicator):
    """Communicator with an alltoall of slices to their owners and an allgather of the sums.

    Rank i owns the elements from i d / P to (i + 1) d / P. What encoding the sum of a slice loses
    goes to the memory of its owner. The owner, too, uses the decoded sum. Source: SparCML (Renggli
    et al. 2019, SSAR and DSAR).

    Args:
        dense: how to send all elements of a slice when that takes fewer bits than sending indices.
            A slice of d elements with n nonzero ones is sent in full if n (I + V) >= d W. I is the
            number of bits per index; V and W are the bits per value of the codec and of the dense
            form. "auto" uses the value codec of the :class:`Codec`, but float32 if that codec
            sorts values, and 2-bit LloydMax if it cannot send zeros. 2, 4 or 8 uses QSGD with that
            many bits. None leaves only the rule of every payload: all elements are sent if the
            payload would otherwise be larger than the slice. Each owner decides for its own slice.
            Payloads are self-describing, so ranks need not agree in advance.

    Raises:
        InvalidArgumentError: ``dense`` is not one of these.
    """

    def __init__(self, dense: int | str | None = "auto") -> None:
        self.dense = expect_choice("SplitAllgather dense", dense, ("auto", None, 2, 4, 8))

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        size, rank = channel.size, channel.rank
        bounds = [owner * bucket.d // size for owner in range(size + 1)]
        own = bucket.select()
        parts = [self._slice(bucket, own, bounds, owner, rank) for owner in range(size)]
        received = yield channel.alltoall(parts)
        start, d = bounds[rank], bounds[rank + 1] - bounds[rank]
        total = merged([part for part in received if part.size], d, rank).without_zeros()
        gathered = yield channel.allgather(self._code_total(bucket, total, start, d, rank))
        return CompleteSum(bucket, _joined(gathered, bounds, rank))

    @staticmethod
    def _slice(bucket, own, bounds, owner, rank):
        """Return the message to the owner of a slice; it is empty if the slice is."""
        start, end = bounds[owner : owner + 2]
        if not own.valid:
            return own.message(end - start)
        first, last = np.searchsorted(own.indices, np.array((start, end), dtype=np.uint32))
        if first == last:
            return _NOTHING
        part = SparseSum(own.indices[first:last] - np.uint32(start), own.values[first:last])
        # this rank's own slice is not sent, so it is encoded without loss
        return bucket.code(part, owner, rank, _EXACT if owner == rank else None, start, end - start)

    def _code_total(self, bucket, total, start, d, rank):
        stage = 2**31 - 1
        codec = bucket.codec
        dense_value = self._dense_value(codec)
        if total.valid and dense_value is not None and 0 < total.indices.size < d:
            count = total.indices.size
            index_bits = math.log2(d / count) + 1 / math.log(2)  # close to the information bound
            if (
                count * (index_bits + codec.value.bits_per_value())
                >= d * dense_value.bits_per_value()
            ):
                values = np.zeros(d, dtype=np.float32)
                values[total.indices] = total.values
                total = SparseSum(np.arange(d, dtype=np.uint32), values)
                codec = Codec(NoneSparsifier(), RawIndex(), dense_value)
        return bucket.code(total, stage, rank, codec, start, d)

    def _dense_value(self, codec):
        if self.dense is None:
            return None
        if self.dense == "auto":
            if codec.value.sorts:  # an order of all elements would be larger than the values
                return RawValue()
            return codec.value if codec.value.sends_zeros else LloydMax(bits=2)
        return QSGD(bits=self.dense, bucket=_BUCKET)


def _joined(gathered, bounds, rank):
    """Return the slices of all owners as one partial sum."""
    try:
        messages = wire.split(gathered, len(bounds) - 1)
        if messages.notices:
            return SparseSum(failure=messages.failures())
        if messages.non_finite.any():
            return SparseSum(non_finite=True)
        payloads = np.split(gathered, messages.bounds[1:-1])
        slices = [
            decode_sum_sparse([payload], end - start)
            for payload, start, end in zip(payloads, bounds, bounds[1:])
        ]
    except Exception as error:
        return failed(rank, error)
    indices = np.concatenate([part + np.uint32(start) for (part, _), start in zip(slices, bounds)])
    return SparseSum(indices, np.concatenate([values for _, values in slices]))
