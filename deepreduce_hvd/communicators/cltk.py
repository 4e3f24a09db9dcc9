"""CLTK: one rank's choice of indices for all."""

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.communicators.sparse_sum import SparseSum, merged
from deepreduce_hvd.communicators.sums import PartialSum
from deepreduce_hvd.stages.value_codecs import Deflate


class CLTK(Communicator):
    """ScaleCom's cyclic local top-k (Chen et al. 2020): the leader, step mod P, chooses; its index
    set is broadcast; values are allreduced.

    All ranks send the same elements, so that sums do not fill in and bytes do not grow with P. The
    index set travels in the codec's index stage, lossless or not; values travel as float32, in
    Horovod's own allreduce, and the codec's value stage plays no part. Made for ChunkTopK and, with
    large batches, LowPass; works with all.
    """

    def exchange(self, bucket, channel):
        leader = bucket.step % channel.size
        message = None
        if channel.rank == leader:
            chosen = bucket.choose()
            if chosen.valid:  # zeros, which take next to no bytes: only the indices matter
                chosen = SparseSum(chosen.indices, np.zeros(chosen.indices.size, dtype=np.float32))
            message = bucket.code(
                chosen, 0, 0, Codec(bucket.codec.sparsifier, bucket.codec.index, Deflate())
            )
        message = yield channel.broadcast(message, leader)
        chosen = merged([message], bucket.d, channel.rank)
        if not chosen.valid:
            return PartialSum(bucket, chosen)
        return (
            yield from sum_values(
                bucket, channel, chosen.indices, bucket.select(given=chosen.indices)
            )
        )
