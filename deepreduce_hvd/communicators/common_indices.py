"""Sum values at indices that all ranks know, with an allreduce."""

import numpy as np

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.sparse_sum import SparseSum, merged
from deepreduce_hvd.communicators.sums import CompleteSum

_NOTHING = np.zeros(0, dtype=np.uint8)


def flagged(count, own):
    """Return ``count`` values of ``own`` followed by two flags, as (count + 2,) float32.

    The flags are whether ``own`` is a failure and whether it is non-finite. The values are zeros in
    both cases.
    """
    numbers = np.zeros(count + 2, dtype=np.float32)
    if own.valid:
        numbers[:-2] = own.values
    numbers[-2] = own.failure is not None
    numbers[-1] = own.non_finite
    return numbers


def notices_of(own):
    """Return the notice of a failure, or an empty array, as this rank's part of an allgather."""
    return _NOTHING if own.failure is None else wire.write_notice(own.failure)


def sum_values(bucket, channel, indices, own):
    """Return the sum of the values of all ranks; a generator.

    The numbers of failed and of non-finite ranks are summed together with the values. If a rank
    failed, the texts of the failures are gathered in a second collective.

    Args:
        bucket: the bucket of this rank.
        channel: the channel of the exchange.
        indices: (n,) uint32, the same on all ranks.
        own: a SparseSum with the values of this rank at ``indices``, or with the reason why there
            are none.
    """
    total = yield channel.allreduce(flagged(indices.size, own))
    if total[-2] > 0:
        notices = yield channel.allgather(notices_of(own))
        return CompleteSum(bucket, merged([notices], bucket.d, channel.rank))
    if total[-1] > 0 or not np.isfinite(total).all():
        return CompleteSum(bucket, SparseSum(non_finite=True))
    return CompleteSum(bucket, SparseSum(indices, total[:-2]))
