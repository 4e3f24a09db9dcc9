"""Allgather: every rank receives every payload."""

from collections.abc import Generator
from typing import Any

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sums import BucketSum, GatheredPayloads


class Allgather(Communicator):
    """Communicator that sends all payloads to all ranks in one allgather.

    The bytes that a rank receives grow with the number of ranks. This is the scheme of DeepReduce
    and of GRACE's allgather.
    """

    puts_back = False
    sends_payloads = True

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        gathered = yield channel.allgather(bucket.encode())
        return GatheredPayloads(bucket, gathered, channel.size)
