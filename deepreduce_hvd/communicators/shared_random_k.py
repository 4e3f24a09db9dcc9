"""SharedRandomK: indices that all ranks draw alike, so that none travel."""

import numpy as np

from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.common_indices import sum_values
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier, RandomK


class SharedRandomK(Communicator):
    """Random indices from the shared seed, values by one allreduce: no index bytes at all, one
    round, no fill-in.

    The sparsifier is RandomK, or NoneSparsifier. Values travel as float32; the codec's index and
    value stages play no part.
    """

    def check(self, codec, memory):
        if not isinstance(codec.sparsifier, (RandomK, NoneSparsifier)):
            raise InvalidArgumentError(
                f"SharedRandomK: expected the sparsifier RandomK or NoneSparsifier, got {codec.sparsifier!r}"
            )

    def exchange(self, bucket, channel):
        own = bucket.select(places_of_held=True)
        indices = own.indices
        if not own.valid:  # the others expect as many numbers as from everyone
            indices = np.zeros(
                sum(
                    bucket.codec.sparsifier.most_selected(member.gradient.size, bucket.step)
                    for member in bucket.members
                ),
                dtype=np.uint32,
            )
        return (yield from sum_values(bucket, channel, indices, own))
