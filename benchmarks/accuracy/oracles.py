"""Communicators that choose k elements in total with more information than a rank has.

GTopK and CLTK also return k elements, while Allgather returns up to k of each rank. The
communicators here show how much of the loss is due to the choice. Their bytes are of no interest.
"""

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.communicators.gtopk import keep_largest
from deepreduce_hvd.communicators.sparse_sum import merged


def _counts(bucket):
    """Return the number of elements that the sparsifier selects from each bucket member."""
    sparsifier = bucket.codec.sparsifier
    return [sparsifier.most_selected(one.gradient.size, bucket.step) for one in bucket.members]


class LargestOfSum(Communicator):
    """Choose the largest elements of the sum of all gradients and memories, per tensor."""

    def exchange(self, bucket, channel):
        own = np.concatenate([one.gradient + one.state[0] for one in bucket.members])
        magnitudes = np.abs((yield channel.allreduce(own)))
        indices = np.concatenate(
            [
                start + np.sort(np.argsort(-magnitudes[start:end], kind="stable")[:k])
                for start, end, k in zip(bucket.offsets, bucket.offsets[1:], _counts(bucket))
            ]
        ).astype(np.uint32)
        return (yield from sum_values(bucket, channel, indices, bucket.select(given=indices)))


class LargestOfSelections(Communicator):
    """Choose the largest elements of the sum of all ranks' selections, over all tensors."""

    def exchange(self, bucket, channel):
        codec = dr.Codec(bucket.codec.sparsifier, dr.Rice())
        message = bucket.code(bucket.choose(), 0, channel.rank, codec, keep=False)
        received = yield channel.alltoall([message] * channel.size)
        total = merged(received, bucket.d, channel.rank)
        chosen, _ = keep_largest(total, sum(_counts(bucket)))
        taken = bucket.select(given=chosen.indices)
        return (yield from sum_values(bucket, channel, chosen.indices, taken))
