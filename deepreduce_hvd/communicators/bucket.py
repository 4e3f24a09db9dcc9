"""The gradients of one bucket on this rank, which communicators see as one tensor."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.sparse_sum import SparseSum, failed
from deepreduce_hvd.numpy_backend import (
    as_float32,
    encode_numpy,
    encode_sparse_numpy,
    put_back_numpy,
    select_numpy,
)
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.memories import NoMemory

if TYPE_CHECKING:
    from deepreduce_hvd.codec import Codec

#: Keys of parameters have 32 bits. Keys of later stages use the bits above, so all keys differ.
_STAGE_BITS = 32
_NOTHING = np.zeros(0, dtype=np.uint32)
_DTYPE_NAMES = {code: name for name, code in container.DTYPES.items()}


def payload_of_nothing(codec: "Codec", d: int, dtype: int = 0) -> np.ndarray:
    """Return a payload that carries no elements and decodes to zeros.

    Args:
        codec: the codec of the payload.
        d: the number of elements of the tensor.
        dtype: the code of the gradient's dtype in docs/format.md.

    Returns:
        (n,) uint8.
    """
    return encode_sparse_numpy(
        codec, _NOTHING, np.zeros(0, dtype=np.float32), d, dtype=_DTYPE_NAMES[dtype]
    )[0]


def label_of(names: Sequence[str]) -> str:
    """Return a short text for gradients: the first and the last name, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


class BucketMember:
    """One gradient of a bucket.

    Args:
        name: the name of the parameter.
        gradient: (d,) contiguous NumPy array.
        state: the (d,) float32 state arrays of the memory.
        key: the key of its random choices.
        dtype: the code of the gradient's dtype in docs/format.md. The default is that of the NumPy
            dtype. bfloat16 numbers are given as uint16.
        threshold: (1,) float32, a hint that makes the next selection faster.
        held: True if the gradient is zero because nothing was computed for the parameter in this
            step. It then sends nothing, and its memory is unchanged.

    Attributes:
        d: the number of elements of the gradient.
    """

    def __init__(
        self,
        name: str,
        gradient: np.ndarray,
        state: tuple[np.ndarray, ...],
        key: int = 0,
        dtype: int | None = None,
        threshold: np.ndarray | None = None,
        held: bool = False,
    ) -> None:
        code = container.DTYPES.get(gradient.dtype.name) if dtype is None else dtype
        self._describe(name, gradient.size, key, code, held)
        self.gradient = gradient
        self.state = state
        self.threshold = np.zeros(1, dtype=np.float32) if threshold is None else threshold

    def _describe(self, name: str, d: int, key: int, dtype: Any, held: bool) -> None:
        """Set what every member has. A subclass may make the arrays when they are read."""
        self.name = name
        self.d = d
        self.key = key
        self.dtype = dtype  # None for another dtype, which encoding refuses
        self.held = held
        self.failure: Exception | None = None
        #: the :class:`~deepreduce_hvd.communicators.encoding_threads.Encoding` of a thread, or None
        self.encoding: Any = None

    def encode(self, bucket: "Bucket") -> np.ndarray:
        """Encode the gradient. The memory keeps what the payload leaves out.

        Args:
            bucket: the bucket of this member, which has the codec, the memory, seed and step.

        Returns:
            The payload, (n,) uint8. If the gradient contains NaN or Inf, the payload is non-finite
            and the memory is unchanged.

        Raises:
            InvalidArgumentError: the gradient or the memory has a wrong dtype or shape, or a stage
                cannot encode, such as a Bloom filter that is too large. After an error of a stage,
                the memory is undefined.
        """
        if self.held:
            return payload_of_nothing(bucket.codec, self.d, self.dtype)
        payload, self.threshold[0] = encode_numpy(
            bucket.codec, bucket.memory, self.gradient, self.state, float(self.threshold[0]),
            bucket.seed, bucket.step, self.key, bucket.rank, dtype=self.dtype,
        )  # fmt: skip
        return payload

    def as_float32(self) -> np.ndarray:
        """Return the gradient as (d,) float32."""
        return as_float32(self.gradient, self.dtype)

    @classmethod
    def failed(cls, name: str, d: int, error: Exception) -> "BucketMember":
        """Return a member for a gradient that could not be read.

        Args:
            name: the name of the parameter.
            d: the number of its elements.
            error: why there is no gradient. The other ranks receive a notice with its text.

        Returns:
            A member whose ``failure`` is ``error``.
        """
        member = cls(name, np.broadcast_to(np.float32(0), d), ())
        member.failure = error
        return member


class Bucket:
    """The gradients of one bucket on one rank, as one tensor of ``d`` elements.

    Args:
        codec: the :class:`Codec` of all members.
        memory: the :class:`Memory` of all members.
        members: a list of :class:`BucketMember`, in the order of their elements.
        seed: the seed of all random choices.
        step: the training step.
        rank: the number of this rank.

    Attributes:
        d: the number of elements of all members together.
        offsets: (number of members + 1,) int64, the first element of each member, and ``d``.
        scheme: a text that ``stats()`` shows: what the communicator does, and why.
    """

    def __init__(
        self,
        codec: "Codec",
        memory: Memory,
        members: Sequence[BucketMember],
        seed: int = 0,
        step: int = 0,
        rank: int = 0,
    ) -> None:
        self.codec = codec
        self.memory = memory
        self.members = members
        self.seed = seed
        self.step = step
        self.rank = rank
        self.scheme: str | None = None  # what the communicator does, and why
        self.offsets = np.cumsum([0, *(member.d for member in members)], dtype=np.int64)
        self.d = int(self.offsets[-1])

    def of(self, members: Sequence[BucketMember]) -> "Bucket":
        """Return a bucket of other members.

        Args:
            members: a list of :class:`BucketMember`, in the order of their elements.

        Returns:
            A :class:`Bucket` with the codec, memory, seed, step and rank of this one.
        """
        return Bucket(self.codec, self.memory, members, self.seed, self.step, self.rank)

    def cuts(self, indices: np.ndarray) -> list[int]:
        """Return where the indices of each member begin.

        Args:
            indices: (n,) uint32, ascending indices in the bucket.

        Returns:
            A list with one position per member, and n. Those of member i are
            ``indices[cuts[i]:cuts[i + 1]]``.
        """
        # keys of the same dtype: otherwise NumPy would convert all indices
        return np.searchsorted(indices, self.offsets.astype(indices.dtype)).tolist()

    @property
    def name(self) -> str:
        """The names of all members, separated by commas."""
        return ", ".join(member.name for member in self.members)

    @property
    def label(self) -> str:
        """A short text that names the members."""
        return label_of([member.name for member in self.members])

    def encode(self) -> np.ndarray:
        """Encode each member as a payload of its own. The memories keep what is not sent.

        Returns:
            The payloads of all members one after another, (n,) uint8. If a member fails, a notice
            takes the place of its payload.
        """
        messages = []
        for member in self.members:
            try:
                if member.failure is not None:
                    raise member.failure
                early = member.encoding
                messages.append(member.encode(self) if early is None else early.payload())
            # send any error to the other ranks, or they would wait
            except Exception as error:
                member.failure = error
                messages.append(wire.notice(error))
        return messages[0] if len(messages) == 1 else np.concatenate(messages)

    def select(self, given: np.ndarray | None = None, places_of_held: bool = False) -> SparseSum:
        """Take elements out of gradient plus memory. The memory keeps the rest.

        Members that are held contribute nothing. If a member has failed or contains NaN or Inf, the
        memories of all members are unchanged.

        Args:
            given: (n,) uint32, ascending indices to take instead of the sparsifier's selection.
            places_of_held: whether members that are held contribute explicit zeros at the indices
                that the sparsifier would select.

        Returns:
            The elements as a :class:`~deepreduce_hvd.communicators.sparse_sum.SparseSum`. If a
            member has failed, it is a failure. If a member contains NaN or Inf, ``non_finite`` is
            True.
        """
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        indices: list[np.ndarray] = []
        values: list[np.ndarray] = []
        cuts = [] if given is None else self.cuts(given)
        for number, member in enumerate(self.members):
            start = int(self.offsets[number])
            found: np.ndarray | None
            taken = None
            if given is not None:
                taken = given[cuts[number] : cuts[number + 1]] - np.uint32(start)
            try:
                if member.held:
                    if taken is not None:
                        found = taken
                    else:
                        found = self._places(member) if places_of_held else _NOTHING
                    selected = np.zeros(found.size, dtype=np.float32)
                else:
                    found, selected, member.threshold[0] = self._select(member, taken, number > 0)
            except Exception as error:
                member.failure = error
                return failed(self.rank, error)
            if found is None:  # the first member, see _refusal
                return SparseSum(non_finite=True)
            indices.append(found + np.uint32(start))
            values.append(selected)
        if len(indices) == 1:
            return SparseSum(indices[0], values[0])
        return SparseSum(np.concatenate(indices), np.concatenate(values))

    def _refusal(self) -> SparseSum | None:
        """Return why no element can be taken, before any memory changes, or None.

        The first member is not searched for NaN and Inf here. Its selection comes first, and checks
        it before it changes a memory.
        """
        finite = True
        for number, member in enumerate(self.members):
            try:
                if member.failure is not None:
                    raise member.failure
                finite &= number == 0 or member.held or self._is_finite(member)
            except Exception as error:
                member.failure = error
                return failed(self.rank, error)
        return None if finite else SparseSum(non_finite=True)

    def _is_finite(self, member: BucketMember) -> bool:
        """Return whether a gradient has neither NaN nor Inf, as the core sees it."""
        found, _, _ = select_numpy(
            self.codec, NoMemory(), member.gradient, (), given=_NOTHING, dtype=member.dtype
        )
        return found is not None

    def _select(
        self, member: BucketMember, taken: np.ndarray | None, finite: bool
    ) -> tuple[np.ndarray | None, np.ndarray, float]:
        """Select from one member; ``finite`` says that :meth:`_refusal` has searched it."""
        return select_numpy(
            self.codec, self.memory, member.gradient, member.state, float(member.threshold[0]),
            self.seed, self.step, member.key,
            taken, dtype=member.dtype, finite=finite,
        )  # fmt: skip

    def _places(self, member: BucketMember) -> np.ndarray:
        """Return what the sparsifier selects from zeros, (n,) uint32."""
        zeros = np.zeros(member.d, dtype=np.float32)
        return select_numpy(
            self.codec, NoMemory(), zeros, (), 0.0, self.seed, self.step, member.key
        )[0]

    def choose(self) -> SparseSum:
        """Return what :meth:`select` would take, without changing the memories.

        Members that are held are included.

        Returns:
            The elements as a :class:`~deepreduce_hvd.communicators.sparse_sum.SparseSum`.
        """
        kept = [(member.state, member.held) for member in self.members]
        try:
            for member in self.members:
                member.state, member.held = tuple(part.copy() for part in member.state), False
            return self.select()
        finally:
            for member, (state, held) in zip(self.members, kept):
                member.state, member.held = state, held

    def put_back(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Return values to the memories that were taken from them but did not reach the sum.

        Args:
            indices: (n,) uint32, ascending.
            values: (n,) float32.
        """
        cuts = self.cuts(indices)
        for member, start, first, last in zip(self.members, self.offsets, cuts, cuts[1:]):
            if first < last:
                put_back_numpy(
                    self.memory, member.state, indices[first:last], values[first:last], int(start)
                )

    def code(
        self,
        partial: SparseSum,
        stage: int,
        group: int,
        codec: "Codec | None" = None,
        start: int = 0,
        d: int | None = None,
        keep: bool = True,
    ) -> np.ndarray:
        """Encode a partial sum as a message.

        Args:
            partial: the partial sum, a :class:`~deepreduce_hvd.communicators.sparse_sum.SparseSum`.
            stage, group: numbers that key the random rounding. Ranks that encode the same sum pass
                the same numbers.
            codec: the codec for indices and values. The default is the codec of the bucket.
            start, d: the first element and the length of the slice of the bucket that ``partial``
                belongs to. The default is the whole bucket.
            keep: whether what the message does not carry goes back to the memory of this rank. Of
                several ranks that encode the same sum, exactly one passes True.

        Returns:
            The message, (n,) uint8. If ``partial`` is a failure, or encoding fails, it is a notice.
        """
        d = self.d if d is None else d
        if not partial.valid:
            return partial.message(d)
        lacks = np.array(partial.values)
        try:
            message, added, added_values = encode_sparse_numpy(
                codec or self.codec,
                partial.indices,
                lacks,
                d,
                self.step,
                self.seed,
                self.members[0].key | stage << _STAGE_BITS,
                group,
            )
            if keep:
                self.put_back(partial.indices + np.uint32(start), lacks)
                self.put_back(added + np.uint32(start), added_values)
        except Exception as error:  # tell the other ranks, or they would wait
            return failed(self.rank, error).message(d)
        return message
