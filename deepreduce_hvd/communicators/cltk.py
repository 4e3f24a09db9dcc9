"""CLTK: one rank selects the indices for all ranks."""

from collections.abc import Generator
from typing import Any

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sparse_sum import SparseSum, merged
from deepreduce_hvd.communicators.sums import BucketSum, CompleteSum
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Memory, Sparsifier, is_built_in
from deepreduce_hvd.stages.index_codecs import Bloom
from deepreduce_hvd.stages.sparsifiers import ChunkTopK, Threshold, TopK
from deepreduce_hvd.stages.value_codecs import Deflate

#: elements of a tensor for which a share below 1 leaves out at least one
_MANY = 2**31 - 1
#: elements of a bucket from which on the fixed parts of a message are small beside its indices
_LARGE = 1024


def _keeps_all_nonzero(sparsifier: Sparsifier) -> bool:
    """Return whether a sparsifier selects all elements of any tensor but zeros."""
    if isinstance(sparsifier, Threshold):
        return sparsifier.keeps_all
    if not isinstance(sparsifier, (TopK, ChunkTopK)):
        return False
    return sparsifier.most_selected(_MANY, sparsifier.schedule_steps) == _MANY


def _decodes_to_itself(bucket: Bucket) -> bool:
    """Return whether the message of the leader's selection decodes to exactly that selection.

    Then one selection gives both the indices and the leader's own values, and a second one is not
    needed. All index codecs of this package but Bloom are lossless. If at most half of the elements
    are selected, their message is never larger than one of all elements, which would replace it.
    """
    index, sparsifier = bucket.codec.index, bucket.codec.sparsifier
    if isinstance(index, Bloom) or not (is_built_in(index) and is_built_in(sparsifier)):
        return False
    if any(member.held for member in bucket.members) or bucket.d < _LARGE:
        return False
    most = [sparsifier.most_selected(member.d, bucket.step) for member in bucket.members]
    return None not in most and 2 * sum(most) <= bucket.d


class CLTK(Communicator):
    """Communicator for the cyclic local top-k of ScaleCom (Chen et al. 2020).

    In each step, one rank is the leader: rank step mod P. It selects elements with the sparsifier
    and broadcasts their indices. The values at these indices are then summed by an allreduce. All
    ranks send the same elements. The sum therefore has no more elements than one rank sends, and
    the bytes do not grow with P.

    The indices are encoded with the index codec of the :class:`Codec`, which can be lossy. Values
    are sent as float32 in Horovod's allreduce, so the value codec is not used. CLTK was designed
    for :class:`ChunkTopK` and, with large batches, :class:`LowPass`. It works with all sparsifiers
    and memories, except ``Threshold(0)``, ``TopK(1.0)`` and ``ChunkTopK(1.0)`` without a memory:
    they keep all non-zero elements, so those that only other ranks than the leader have would be
    lost.
    """

    def check(self, codec: Codec, memory: Memory) -> None:
        if _keeps_all_nonzero(codec.sparsifier) and not memory.state:
            raise InvalidArgumentError(
                f"CLTK: expected a memory with {codec.sparsifier!r}, because only elements that are"
                f" not zero on the leader are sent, got {memory!r}; use Allgather"
            )

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        leader = bucket.step % channel.size
        message = own = None
        if channel.rank == leader:
            if _decodes_to_itself(bucket):
                chosen = own = bucket.select()
            else:
                chosen = bucket.choose()
            if chosen.valid:  # only the indices matter; zeros compress to almost nothing
                chosen = SparseSum(chosen.indices, np.zeros(chosen.indices.size, dtype=np.float32))
            message = bucket.code(chosen, 0, 0, bucket.codec.with_stages(value=Deflate()))
        message = yield channel.broadcast(message, leader)
        chosen = merged([message], bucket.d, channel.rank)
        if not chosen.valid:
            return CompleteSum(bucket, chosen)
        if own is None:
            own = bucket.select(given=chosen.indices)
        return (yield from sum_values(bucket, channel, chosen.indices, own))
