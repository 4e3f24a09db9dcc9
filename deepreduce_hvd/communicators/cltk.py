"""CLTK: one rank's choice of indices for all."""

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.communicators.partial import Partial, merged
from deepreduce_hvd.communicators.sums import PartialSum
from deepreduce_hvd.value import Deflate


class CLTK(Communicator):
    """ScaleCom's cyclic local top-k (Chen et al. 2020): the leader, step mod P, chooses; its index set is broadcast; values are allreduced.

    All ranks send the same elements, so that sums do not fill in and bytes do not grow with P. The index set travels in the codec's index
    stage, lossless or not; values travel as float32, in Horovod's own allreduce, and the codec's value stage plays no part. Made for
    ChunkTopK and, with large batches, LowPass; works with all.
    """

    def exchange(self, job, channel):
        leader = job.step % channel.size
        message = None
        if channel.rank == leader:
            chosen = job.choose()
            if chosen.valid:  # zeros, which take next to no bytes: only the indices matter
                chosen = Partial(chosen.indices, np.zeros(chosen.indices.size, dtype=np.float32))
            message = job.code(chosen, 0, 0, Codec(job.codec.sparsifier, job.codec.index, Deflate()))
        message = yield channel.broadcast(message, leader)
        chosen = merged([message], job.d, channel.rank)
        if not chosen.valid:
            return PartialSum(job, chosen)
        return (yield from sum_values(job, channel, chosen.indices, job.select(given=chosen.indices)))
