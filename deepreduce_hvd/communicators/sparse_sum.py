"""SparseSum sums on their way between ranks: ascending indices with values, or why there are none."""

import numpy as np

from deepreduce_hvd import container, wire
from deepreduce_hvd.numpy_backend import decode_sum_sparse

_NO_INDICES = np.zeros(0, dtype=np.uint32)
_NO_VALUES = np.zeros(0, dtype=np.float32)


class SparseSum:
    """A sparse tensor: ``indices`` (n,) ascending uint32, ``values`` (n,) float32; or
    ``non_finite``; or the text of a ``failure``.
    """

    def __init__(self, indices=_NO_INDICES, values=_NO_VALUES, non_finite=False, failure=None):
        self.indices = indices
        self.values = values
        self.non_finite = non_finite
        self.failure = failure

    @property
    def valid(self):
        return not self.non_finite and self.failure is None

    def without_zeros(self):
        """The same tensor; a payload of all elements, or one of a lossy index codec, carries zeros
        too.
        """
        kept = self.values != 0
        return self if kept.all() else SparseSum(self.indices[kept], self.values[kept])

    def message(self, d):
        """What stands in for a payload of a tensor of ``d`` elements when there is none."""
        if self.failure is not None:
            return wire.write_notice(self.failure)
        return container.write(container.Payload(d, 0, flags=container.NON_FINITE))


def failed(rank, error):
    """The partial sum of a rank that met ``error``."""
    return SparseSum(failure=f"rank {rank}: {wire.describe(error)}")


def merged(messages, d, rank):
    """The sum of the messages (n,) uint8 over a tensor of ``d`` elements, in the order given;
    ``rank`` is who adds them.
    """
    try:
        read = [wire.split(message) for message in messages]
        notices = [
            one.notice.decode(errors="replace")
            for parts in read
            for one in parts
            if one.notice is not None
        ]
        if notices:
            return SparseSum(failure="; ".join(dict.fromkeys(notices)))
        if any(one.non_finite for parts in read for one in parts):
            return SparseSum(non_finite=True)
        if not messages:
            return SparseSum()
        indices, values = decode_sum_sparse(messages, d)
    except Exception as error:  # the other ranks hear of it instead of waiting
        return failed(rank, error)
    # a sum beyond float32 is as void as a gradient that is not finite
    return SparseSum(indices, values) if np.isfinite(values).all() else SparseSum(non_finite=True)
