"""Values at indices that all ranks know, summed by an allreduce."""

import numpy as np

from deepreduce_hvd import wire
from deepreduce_hvd.communicators.sparse_sum import SparseSum, merged
from deepreduce_hvd.communicators.sums import PartialSum

_NOTHING = np.zeros(0, dtype=np.uint8)


def flagged(count, own):
    """``count`` values of ``own``, zeros if there are none, and two numbers: whether it failed,
    whether it is not finite.
    """
    numbers = np.zeros(count + 2, dtype=np.float32)
    if own.valid:
        numbers[:-2] = own.values
    numbers[-2] = own.failure is not None
    numbers[-1] = own.non_finite
    return numbers


def notices_of(own):
    """What a rank adds to the gather of failures' texts."""
    return _NOTHING if own.failure is None else wire.write_notice(own.failure)


def sum_values(bucket, channel, indices, own):
    """A generator that returns the sum; ``own`` holds this rank's values at ``indices`` (n,), or
    why there are none.

    Two more numbers are summed: how many ranks failed and how many are not finite. The texts of
    failures are gathered only then.
    """
    total = yield channel.allreduce(flagged(indices.size, own))
    if total[-2] > 0:
        notices = yield channel.allgather(notices_of(own))
        return PartialSum(bucket, merged([notices], bucket.d, channel.rank))
    if total[-1] > 0 or not np.isfinite(total).all():
        return PartialSum(bucket, SparseSum(non_finite=True))
    return PartialSum(bucket, SparseSum(indices, total[:-2]))
