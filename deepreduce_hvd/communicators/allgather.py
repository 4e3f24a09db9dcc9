"""Allgather: every rank receives every payload."""

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.sums import GatheredPayloads


class Allgather(Communicator):
    """Communicator that sends all payloads to all ranks in one allgather.

    The bytes that a rank receives grow with the number of ranks. This is the scheme of DeepReduce
    and of GRACE's allgather.
    """

    puts_back = False
    sends_payloads = True

    def exchange(self, bucket, channel):
        gathered = yield channel.allgather(bucket.encode())
        return GatheredPayloads(bucket, gathered, channel.size)
