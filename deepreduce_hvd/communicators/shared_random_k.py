"""SharedRandomK: all ranks draw the same indices, so no indices are sent."""

from collections.abc import Generator
from typing import Any

import numpy as np

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sums import BucketSum
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier, RandomK


class SharedRandomK(Communicator):
    """Communicator that sums values at shared random indices by one allreduce.

    All ranks draw the same indices from the shared seed. No indices are sent, there is one round,
    and the sum has no more elements than one rank sends. The sparsifier must be :class:`RandomK` or
    :class:`NoneSparsifier`. Values are sent as float32; the index and value codecs of the
    :class:`Codec` are not used.
    """

    def check(self, codec: Codec, memory: Memory) -> None:
        # a subclass may select other elements on each rank
        if type(codec.sparsifier) not in (RandomK, NoneSparsifier):
            raise InvalidArgumentError(
                "SharedRandomK: expected the sparsifier RandomK or NoneSparsifier, got"
                f" {codec.sparsifier!r}"
            )

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        own = bucket.select(places_of_held=True)
        indices = own.indices
        if not own.valid:  # the other ranks expect the same number of values from every rank
            indices = np.zeros(
                sum(
                    bucket.codec.sparsifier.most_selected(member.d, bucket.step)
                    for member in bucket.members
                ),
                dtype=np.uint32,
            )
        return (yield from sum_values(bucket, channel, indices, own))
