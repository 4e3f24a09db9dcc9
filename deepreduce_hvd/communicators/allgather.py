"""Allgather: every rank receives every payload."""

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.sums import PayloadSum


class Allgather(Communicator):
    """One allgather of payloads; bytes received grow with the number of ranks (DeepReduce; GRACE's
    allgather).
    """

    puts_back = False

    def exchange(self, bucket, channel):
        gathered = yield channel.allgather(bucket.encode())
        return PayloadSum(bucket, gathered, channel.size)
