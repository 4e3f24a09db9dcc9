"""One rank's side of an exchange: the gradients of a bucket, which communicators see as one tensor."""

import numpy as np

from deepreduce_hvd import container, wire
from deepreduce_hvd.communicators.sparse_sum import SparseSum, failed
from deepreduce_hvd.numpy_backend import as_float32, encode_numpy, encode_sparse_numpy, select_numpy
from deepreduce_hvd.stages.memories import NoMemory

#: coding keys of later stages are apart from those of the first; parameters' keys have 32 bits
_STAGE_BITS = 32
_NOTHING = np.zeros(0, dtype=np.uint32)
_DTYPE_NAMES = {code: name for name, code in container.DTYPES.items()}


def payload_of_nothing(codec, d, dtype=0):
    """A payload (n,) uint8 of ``d`` elements of the type with the code ``dtype`` that decodes to
    zeros and carries none.
    """
    return encode_sparse_numpy(
        codec, _NOTHING, np.zeros(0, dtype=np.float32), d, dtype=_DTYPE_NAMES[dtype]
    )[0]


class BucketMember:
    """One gradient: ``gradient`` contiguous (d,), ``state`` the memory's float32 arrays (d,),
    ``key`` of its random choices.

    ``dtype`` is the gradient's code in docs/format.md, by default that of its NumPy type; numbers
    of bfloat16 come as uint16. ``threshold`` (1,) float32 is the hint that makes the next selection
    faster. ``encode`` overrides how its payload is made. ``held``: the gradient is zero because
    nothing was learnt of the parameter in this step. It sends nothing, and its memory stays as it
    is.
    """

    def __init__(
        self, name, gradient, state, key=0, dtype=None, threshold=None, encode=None, held=False
    ):
        self.name = name
        self.gradient = gradient
        self.state = state
        self.key = key
        self.dtype = container.DTYPES.get(gradient.dtype.name) if dtype is None else dtype
        self.threshold = np.zeros(1, dtype=np.float32) if threshold is None else threshold
        self.encode = encode
        self.held = held
        self.failure = None

    def as_float32(self):
        """The gradient as (d,) float32."""
        return as_float32(self.gradient, self.dtype)

    @classmethod
    def failed(cls, name, d, error):
        """A gradient of ``d`` elements that met ``error`` before it could take part: the other
        ranks will hear of it.
        """
        member = cls(name, np.broadcast_to(np.float32(0), d), ())
        member.failure = error
        return member


class Bucket:
    """A bucket of members in a row, as one tensor of ``d`` elements."""

    def __init__(self, codec, memory, members, seed=0, step=0, rank=0):
        self.codec = codec
        self.memory = memory
        self.members = members
        self.seed = seed
        self.step = step
        self.rank = rank
        self.scheme = None  # what the communicator says that it does, and why
        self.offsets = np.concatenate(
            [[0], np.cumsum([member.gradient.size for member in members])]
        ).astype(np.int64)
        self.d = int(self.offsets[-1])

    def of(self, members):
        """The same bucket of other members."""
        return Bucket(self.codec, self.memory, members, self.seed, self.step, self.rank)

    @property
    def name(self):
        return ", ".join(member.name for member in self.members)

    def encode(self):
        """The members' payloads one after another, (n,) uint8; a notice in place of one that fails.
        Memories keep the rest.
        """
        messages = []
        for member in self.members:
            try:
                if member.failure is not None:
                    raise member.failure
                messages.append(self._encode(member) if member.encode is None else member.encode())
            # whatever it is, the other ranks must hear of it instead of waiting
            except Exception as error:
                member.failure = error
                messages.append(wire.notice(error))
        return messages[0] if len(messages) == 1 else np.concatenate(messages)

    def _encode(self, member):
        if member.held:
            return payload_of_nothing(self.codec, member.gradient.size, member.dtype)
        payload, member.threshold[0] = encode_numpy(
            self.codec, self.memory, member.gradient, member.state, float(member.threshold[0]),
            self.seed, self.step, member.key, self.rank, dtype=member.dtype,
        )  # fmt: skip
        return payload

    def select(self, given=None, places_of_held=False):
        """Takes the sparsifier's choice, or ``given`` indices, out of gradient plus memory, as a
        :class:`SparseSum`.

        Of members that are held nothing is taken; with ``places_of_held`` zeros stand where the
        sparsifier would choose.
        """
        indices, values = [], []
        for number, member in enumerate(self.members):
            start, end = self.offsets[number : number + 2]
            taken = None
            if given is not None:
                first, last = np.searchsorted(given, (start, end))
                taken = given[first:last] - np.uint32(start)
            try:
                if member.failure is not None:
                    raise member.failure
                if member.held:
                    found = taken
                    if given is None:
                        found = self._places(member) if places_of_held else _NOTHING
                    selected = np.zeros(found.size, dtype=np.float32)
                else:
                    found, selected, member.threshold[0] = self._select(member, taken)
            except Exception as error:
                member.failure = error
                return failed(self.rank, error)
            if found is None:
                try:
                    for done, kept in zip(indices, values):
                        self.put_back(done, kept)
                except Exception as error:
                    return failed(self.rank, error)
                return SparseSum(non_finite=True)
            indices.append(found + np.uint32(start))
            values.append(selected)
        if len(indices) == 1:
            return SparseSum(indices[0], values[0])
        return SparseSum(np.concatenate(indices), np.concatenate(values))

    def _select(self, member, taken):
        return select_numpy(
            self.codec, self.memory, member.gradient, member.state, float(member.threshold[0]), self.seed, self.step, member.key,
            taken, dtype=member.dtype,
        )  # fmt: skip

    def _places(self, member):
        """What the sparsifier chooses of zeros, (n,) uint32."""
        zeros = np.zeros(member.gradient.size, dtype=np.float32)
        return select_numpy(
            self.codec, NoMemory(), zeros, (), 0.0, self.seed, self.step, member.key
        )[0]

    def choose(self):
        """The sparsifier's choice as a :class:`SparseSum`, with memories left as they are; members
        that are held have one too.
        """
        kept = [(member.state, member.held) for member in self.members]
        try:
            for member in self.members:
                member.state, member.held = tuple(part.copy() for part in member.state), False
            return self.select()
        finally:
            for member, (state, held) in zip(self.members, kept):
                member.state, member.held = state, held

    def put_back(self, indices, values):
        """Returns to the memories what was taken and did not reach the sum: ``values`` (n,) at
        ascending ``indices`` (n,).
        """
        lost = values != 0
        if not lost.any():
            return
        indices, values = indices[lost], values[lost]
        for number, member in enumerate(self.members):
            start, end = self.offsets[number : number + 2]
            first, last = np.searchsorted(indices, (start, end))
            if first < last:
                self.memory.put_back(
                    member.state, indices[first:last] - np.uint32(start), values[first:last]
                )

    def code(self, partial, stage, group, codec=None, start=0, d=None, keep=True):
        """``partial`` as a message (n,) uint8.

        Args:
            stage, group: key the rounding; ranks that code the same sum give the same numbers.
            codec: of indices and values; the bucket's own by default.
            start, d: what slice of the bucket's tensor it is a partial sum of; all of it by
                default.
            keep: whether what the message lacks goes back to this rank's memory; of ranks that code
                the same sum, one does.
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
        except Exception as error:  # the other ranks hear of it instead of waiting
            return failed(self.rank, error).message(d)
        return message


def assign_to_buckets(sizes, bucket_bytes):
    """Cuts tensors of ``sizes`` elements (of float32), in the order in which they become ready,
    into buckets.

    A bucket is closed once it holds ``bucket_bytes``; 0 gives every tensor one of its own. Returns
    lists of positions in ``sizes``.
    """
    buckets, filled = [], 0
    for position, size in enumerate(sizes):
        if not buckets or filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(position)
        filled += 4 * size
    return buckets
