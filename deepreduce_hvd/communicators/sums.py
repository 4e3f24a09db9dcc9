"""The result of an exchange: the sum of a bucket over all ranks.

It is either still in the payloads of all ranks, :class:`GatheredPayloads`, or a sparse tensor,
:class:`CompleteSum`. A sum over some of the ranks, which ranks exchange on the way, is a
:class:`~deepreduce_hvd.communicators.sparse_sum.SparseSum`.
"""

from typing import Any

import numpy as np

from deepreduce_hvd.arrays import describe
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError, PeerFailedError
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.numpy_backend import add_payloads, add_sparse_numpy, decode_sum_sparse
from deepreduce_hvd.stages.calls import expect_ascending


class BucketSum:
    """Base class: the sum of one bucket over all ranks."""

    def non_finite(self, member: int) -> bool:
        """Return whether the sum of a bucket member is void.

        It is void if the gradient of some rank contains NaN or Inf, or if a partial sum overflowed.

        Args:
            member: the number of the bucket member.

        Returns:
            True if the sum is void.
        """
        raise NotImplementedError

    def add_to(self, member: int, out: np.ndarray, scale: float) -> float:
        """Add ``scale`` times the sum of a bucket member to ``out``.

        If the sum is void, ``out`` becomes NaN everywhere.

        Args:
            member: the number of the bucket member.
            out: (d,) float32 NumPy array, updated in place.
            scale: a finite number.

        Returns:
            The largest magnitude of any result of an addition; NaN counts as the largest. If it is
            finite, no addition overflowed.
        """
        raise NotImplementedError

    def sparse(self, member: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return ``scale`` times the sum of a bucket member as a sparse tensor.

        The sum must not be void.

        Args:
            member: the number of the bucket member.
            scale: a finite number.

        Returns:
            A tuple ((n,) uint32 ascending indices, (n,) float32 values).
        """
        raise NotImplementedError


class GatheredPayloads(BucketSum):
    """The payloads of all ranks, which are decoded and added when the sum is used.

    Args:
        bucket: the :class:`~deepreduce_hvd.communicators.bucket.Bucket` of this rank.
        gathered: the messages of all ranks in rank order, (n,) uint8, each with one payload or
            notice per bucket member.
        size: number of ranks.

    Attributes:
        members: the bucket's members.
        starts, ends: (number of members, number of ranks) int64, the positions of the payloads in
            ``gathered``.

    Raises:
        PeerFailedError: a rank sent a notice.
        CorruptPayloadError: the messages cannot be divided into payloads.
    """

    def __init__(self, bucket: Bucket, gathered: Any, size: int) -> None:
        self.gathered = gathered
        try:
            messages = wire.split(gathered, of_each=len(bucket.members))
        except CorruptPayloadError as error:
            raise CorruptPayloadError(f"parameter {bucket.name}: {error}") from None
        self._divide(bucket, messages, size)

    def _divide(self, bucket: Bucket, messages: wire.Messages, size: int) -> None:
        """Find the messages of each member.

        Args:
            bucket: the bucket of this rank.
            messages: the :class:`~deepreduce_hvd.communicators.wire.Messages`, of all members of
                the first rank, then of the next.
            size: number of ranks.
        """
        count = len(bucket.members)
        if len(messages) != size * count:
            raise CorruptPayloadError(
                f"parameter {bucket.name}: expected {count} payloads from each of {size} ranks, got"
                f" {len(messages)} in all"
            )
        self.members = bucket.members
        self._offsets = bucket.offsets
        self._is_native = bucket.codec.is_native(bucket.memory)
        self.starts, self.ends = (
            np.ascontiguousarray(bounds.reshape(size, count).T)
            for bounds in (messages.bounds[:-1], messages.bounds[1:])
        )
        self._non_finite = messages.non_finite.reshape(size, count).any(axis=0).tolist()
        for number, member in enumerate(bucket.members if messages.notices else ()):
            try:
                wire.raise_notices(member.name, messages, number, count)
            except PeerFailedError as error:
                raise error from member.failure

    def payloads(self, member: int) -> list[Any]:
        """Return the payloads of a bucket member.

        Args:
            member: the number of the bucket member.

        Returns:
            A list of (n,) uint8 arrays in rank order, which are views of ``gathered``.
        """
        return [
            self.gathered[start:end]
            for start, end in zip(self.starts[member].tolist(), self.ends[member].tolist())
        ]

    def non_finite(self, member: int) -> bool:
        """Return whether a payload of the member is void, see :meth:`BucketSum.non_finite`."""
        return self._non_finite[member]

    def add_to(self, member: int, out: np.ndarray, scale: float) -> float:
        """Decode the payloads of all ranks and add them, see :meth:`BucketSum.add_to`.

        Raises:
            CorruptPayloadError: a payload cannot be decoded; the message names its rank.
        """
        try:
            if self._is_native:
                return _native.decode_sum_of(
                    self.gathered, self.starts[member], self.ends[member], out, scale
                )
            return add_payloads(self.payloads(member), out, scale)
        except CorruptPayloadError:
            self._raise_culprit(member)
            raise

    def sparse(self, member: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Decode the payloads as a sparse tensor, see :meth:`BucketSum.sparse`.

        Raises:
            CorruptPayloadError: a payload cannot be decoded; the message names its rank.
        """
        try:
            return decode_sum_sparse(self.payloads(member), self._size_of(member), scale)
        except CorruptPayloadError:
            self._raise_culprit(member)
            raise

    def _size_of(self, member: int) -> int:
        return int(self._offsets[member + 1] - self._offsets[member])

    def _raise_culprit(self, member: int) -> None:
        """Raise an error that names the rank whose payload cannot be decoded."""
        for rank, payload in enumerate(self.payloads(member)):
            try:
                decode_sum_sparse([payload], self._size_of(member))
            except CorruptPayloadError as error:
                raise CorruptPayloadError(
                    f"parameter {self.members[member].name}: rank {rank}: {error}"
                ) from None


class CompleteSum(BucketSum):
    """A sum that already includes all ranks.

    Args:
        bucket: the :class:`~deepreduce_hvd.communicators.bucket.Bucket` of this rank.
        sparse_sum: the sum of the whole bucket over all ranks, a
            :class:`~deepreduce_hvd.communicators.sparse_sum.SparseSum`.

    Raises:
        PeerFailedError: ``sparse_sum`` is a failure.
        InvalidArgumentError: its indices are not ascending, distinct uint32 numbers below the
            bucket's ``d``, or its values are not one float32 number for each of them.
    """

    def __init__(self, bucket: Bucket, sparse_sum: SparseSum) -> None:
        if sparse_sum.failure is not None:
            failure = next(
                (member.failure for member in bucket.members if member.failure is not None), None
            )
            raise PeerFailedError(f"parameter {bucket.name}: {sparse_sum.failure}") from failure
        if not sparse_sum.non_finite:
            _expect_tensor(sparse_sum, bucket.d)
        self._offsets = bucket.offsets
        self._cuts = bucket.cuts(sparse_sum.indices)
        self.sparse_sum = sparse_sum

    def non_finite(self, member: int) -> bool:
        """Return whether the sum of the bucket is void, see :meth:`BucketSum.non_finite`."""
        return self.sparse_sum.non_finite

    def _cut(self, member: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (indices in the bucket, values, first element) of a member."""
        part = slice(self._cuts[member], self._cuts[member + 1])
        return self.sparse_sum.indices[part], self.sparse_sum.values[part], self._offsets[member]

    def add_to(self, member: int, out: np.ndarray, scale: float) -> float:
        """Add the sum of the member to ``out``, see :meth:`BucketSum.add_to`."""
        if self.sparse_sum.non_finite:
            out[:] = np.nan
            return np.nan
        indices, values, start = self._cut(member)
        return add_sparse_numpy(indices, values, out, scale, int(start))

    def sparse(self, member: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the member as a sparse tensor, see :meth:`BucketSum.sparse`."""
        indices, values, start = self._cut(member)
        # in the core, because NumPy would flush denormal numbers on some threads
        scaled = np.zeros(values.size, dtype=np.float32)
        add_sparse_numpy(np.arange(values.size, dtype=np.uint32), values, scaled, scale)
        return indices - np.uint32(start), scaled


def _expect_tensor(total: SparseSum, d: int) -> None:
    """Check a sum, which a communicator of the user may have made.

    Otherwise elements without a valid index would be lost without an error.
    """
    expect_ascending("CompleteSum indices", total.indices, d)
    values = total.values
    good = isinstance(values, np.ndarray) and values.dtype == np.float32
    if not good or values.shape != total.indices.shape:
        raise InvalidArgumentError(
            f"CompleteSum values: expected a float32 array of shape {total.indices.shape}, one"
            f" number for each index, got {describe(values)}"
        )
