"""SparseSum: a partial sum on its way between ranks."""

from collections.abc import Sequence

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.numpy_backend import decode_sum_sparse

_NO_INDICES = np.zeros(0, dtype=np.uint32)
_NO_VALUES = np.zeros(0, dtype=np.float32)


class SparseSum:
    """A sparse tensor, or the reason why there is none.

    Args:
        indices, values, non_finite, failure: the attributes below.

    Attributes:
        indices: (n,) uint32, ascending.
        values: (n,) float32.
        non_finite: whether the sum is void because of NaN or Inf.
        failure: the text of a failure, or None.
    """

    def __init__(
        self,
        indices: np.ndarray = _NO_INDICES,
        values: np.ndarray = _NO_VALUES,
        non_finite: bool = False,
        failure: str | None = None,
    ) -> None:
        self.indices = indices
        self.values = values
        self.non_finite = non_finite
        self.failure = failure

    @property
    def valid(self) -> bool:
        """Whether this is a tensor, neither void nor a failure."""
        return not self.non_finite and self.failure is None

    def without_zeros(self) -> "SparseSum":
        """Return the same tensor without explicit zeros.

        A payload of all elements, or one from a lossy index codec, also carries zeros.

        Returns:
            A :class:`SparseSum`; this one if it has no zeros.
        """
        kept = is_nonzero(self.values)
        return self if kept.all() else SparseSum(self.indices[kept], self.values[kept])

    def message(self, d: int) -> np.ndarray:
        """Return the message to send in place of a payload if this is not a valid tensor.

        Args:
            d: the number of elements of the tensor.

        Returns:
            (n,) uint8: a notice with the failure, or a non-finite payload.
        """
        if self.failure is not None:
            return wire.write_notice(self.failure)
        return container.write(container.Payload(d, 0, flags=container.NON_FINITE))


def failed(rank: int, error: Exception) -> SparseSum:
    """Return a failure in place of the partial sum of a rank that raised an error.

    Args:
        rank: the number of the rank.
        error: the error.

    Returns:
        A :class:`SparseSum` whose ``failure`` names the rank and the error.
    """
    return SparseSum(failure=f"rank {rank}: {wire.describe(error)}")


def merged(messages: Sequence[np.ndarray], d: int, rank: int) -> SparseSum:
    """Decode messages and add them up in the given order.

    Args:
        messages: a list of (n,) uint8 arrays, as :meth:`Bucket.code` returns them. An array may
            have several messages, one after another, as an allgather returns them.
        d: the number of elements of the tensor.
        rank: the rank that adds them, for error messages.

    Returns:
        The sum as a :class:`SparseSum`. If a message is a notice or cannot be decoded, it is a
        failure. If a message or the sum is not finite, ``non_finite`` is True.
    """
    try:
        read = [wire.split(message) for message in messages]
        failures = [one.failures() for one in read if one.notices]
        if failures:
            return SparseSum(failure="; ".join(dict.fromkeys(failures)))
        if any(one.non_finite.any() for one in read):
            return SparseSum(non_finite=True)
        if not messages:
            return SparseSum()
        payloads = [
            payload
            for message, one in zip(messages, read)
            for payload in np.split(message, one.bounds[1:-1])
        ]
        indices, values = decode_sum_sparse(payloads, d)
    except Exception as error:  # tell the other ranks, or they would wait
        return failed(rank, error)
    # a sum that overflows float32 is as void as a gradient with NaN or Inf
    return SparseSum(indices, values) if np.isfinite(values).all() else SparseSum(non_finite=True)
