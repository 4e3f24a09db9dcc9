"""RecursiveDoubling: exchange whole partial sums between pairs of ranks."""

from collections.abc import Generator
from typing import Any

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.doubling import butterfly
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.communicators.sums import BucketSum


class RecursiveDoubling(Communicator):
    """Communicator that exchanges partial sums between pairs of ranks.

    It takes ceil(log2 P) rounds of pairs, and one or two more for errors and if the number of ranks
    P is not a power of two (docs/communicators.md). It works with any number of ranks. It is the
    best choice when latency matters more than bytes: for few elements, or when all ranks select the
    same elements. When a sum is so full that sending all elements needs fewer bytes, all elements
    are sent. Source: SparCML (Renggli et al. 2019, SSAR_Recursive_double).
    """

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        return (yield from butterfly(bucket, channel, lambda total: (total, SparseSum())))
