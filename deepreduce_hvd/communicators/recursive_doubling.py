"""RecursiveDoubling: whole partial sums between pairs of ranks."""

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.doubling import butterfly
from deepreduce_hvd.communicators.sparse_sum import SparseSum


class RecursiveDoubling(Communicator):
    """SparCML's recursive doubling (Renggli et al. 2019, SSAR_Recursive_double): ceil(log2 P)
    rounds between pairs, any number of ranks.

    Best when latency counts for more than bytes, that is for few elements or when ranks choose the
    same ones. A sum that has become so full that all elements cost fewer bytes travels as all
    elements.
    """

    def exchange(self, bucket, channel):
        return (yield from butterfly(bucket, channel, lambda total: (total, SparseSum())))
