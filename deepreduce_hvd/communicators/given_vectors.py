"""Sums of sparse vectors that the user gives, over any communicator that selects nothing itself."""

import json
import math
import zlib
from typing import Any, cast

import numpy as np

from deepreduce_hvd.argument_checks import is_number
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.base import Communicator, expect_exchange
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.cltk import CLTK
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.hierarchical import Hierarchical
from deepreduce_hvd.communicators.shared_random_k import SharedRandomK
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError, PeerFailedError
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.numpy_backend import add_sparse_numpy
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.stages.sparsifiers import TopK

#: Communicators that select elements themselves, or that sum dense tensors.
_NOT_FOR_VECTORS = (CLTK, SharedRandomK, Hierarchical)
_NO_INDICES = np.zeros(0, dtype=np.uint32)
_NO_VALUES = np.zeros(0, dtype=np.float32)
#: maximum characters of an error and of a setting in a message, so that it fits into one notice
_LONGEST_FAILURE, _LONGEST_SETTING = 600, 120


class GivenVector(Bucket):
    """A sparse vector as the bucket of this rank. No array of d elements is allocated.

    Args:
        name: the name of the vector, for error messages.
        indices: (n,) uint32, ascending and distinct, less than ``d``.
        values: (n,) float32.
        d: the number of elements of the dense vector.
        rank: the number of this rank.
        step: how many vectors of this name there were before. Random choices depend on it.
        kind: a hashable value. Sums of one kind have about as many elements. The default is what
            vectors of about this size with the same codecs share.
    """

    def __init__(self, name, indices, values, d, rank=0, step=0, kind=None):
        member = BucketMember(
            name, np.broadcast_to(np.float32(0), d), (), zlib.crc32(name.encode())
        )
        # the codec is known when the exchange begins
        super().__init__(cast(Any, None), NoMemory(), [member], step=step, rank=rank)
        self.kind = kind
        self._given = SparseSum(indices, values)
        self._lost = []

    @classmethod
    def failed(cls, name, error, rank=0):
        """Return the vector of a rank that met ``error``, which all ranks will raise."""
        vector = cls(name, _NO_INDICES, _NO_VALUES, 1, rank)
        vector.members[0].failure = error
        return vector

    @property
    def count(self):
        """The number of elements that this rank gives."""
        return self._given.indices.size

    def select(self, given=None, places_of_held=False):
        return self._given

    def encode(self):
        return self.code(self._given, 0, self.rank)

    def put_back(self, indices, values):
        lost = is_nonzero(values)
        self._lost.append((indices[lost], values[lost]))

    def rest(self):
        """Return the part that the sum lacks and that this rank is responsible for.

        Returns:
            A tuple ((n,) uint32 ascending indices, (n,) float32 values).
        """
        parts = [part for part in self._lost if part[0].size]
        if not parts:
            return _NO_INDICES, _NO_VALUES
        found = np.unique(np.concatenate([indices for indices, _ in parts]))
        sums = np.zeros(found.size, dtype=np.float32)
        for indices, values in parts:
            # in the core, because NumPy would flush denormal numbers on some threads
            places = np.searchsorted(found, indices).astype(np.uint32)
            add_sparse_numpy(places, values, sums, 1.0)
        left = is_nonzero(sums)
        return found[left], sums[left]


class GivenVectorSum(Communicator):
    """Communicator that sums :class:`GivenVector` objects by another communicator.

    All ranks compare their arguments first, in one allgather. So arguments that are not valid on
    one rank, or that differ between ranks, raise an error on every rank.

    Args:
        communicator: the communicator that sums.
        index, value: the codecs.
        settings: a dictionary of other settings that must be equal on all ranks.
    """

    def __init__(self, communicator, index, value, settings):
        self.communicator = communicator
        self.index = index
        self.value = value
        self.settings = settings

    @staticmethod
    def expect_communicator(communicator):
        """Raise InvalidArgumentError unless ``communicator`` can sum given vectors."""
        if not isinstance(communicator, Communicator) or isinstance(communicator, _NOT_FOR_VECTORS):
            others = ", ".join(kind.__name__ for kind in _NOT_FOR_VECTORS)
            raise InvalidArgumentError(
                f"communicator: expected a communicator other than {others}, got {communicator!r}"
                + ("; write communicator=dr.Auto()" if communicator == "auto" else "")
            )
        expect_exchange("communicator", communicator)

    def exchange(self, bucket, channel):
        if bucket.kind is None:
            settings = repr(self.index), repr(self.value)
            bucket.kind = bucket.d, bucket.count.bit_length(), *settings
        described = yield channel.allgather(self._description(bucket, channel.transport))
        most, bucket.step, known = self._compare(bucket, described, channel.size)
        # GTopK keeps as many elements as the longest vector has
        bucket.codec = Codec(TopK(k=max(most, 1)), self.index, self.value)
        self.communicator.check(bucket.codec, bucket.memory)
        return (yield from self.communicator.exchange_vector(bucket, channel, known))

    def _description(self, bucket, transport):
        """Return the arguments of this rank, or the error that it met, as a message."""
        failure = bucket.members[0].failure
        if failure is not None:
            described = {"failure": wire.describe(failure)[:_LONGEST_FAILURE]}
        else:
            settings = {
                "communicator": repr(self.communicator),
                "index": repr(self.index),
                "value": repr(self.value),
                "d": str(bucket.d),
                **self.settings,
            }
            described = {
                "count": bucket.count,
                "step": bucket.step,
                "known": self.communicator.known(bucket, transport),
                "settings": {what: _short(text) for what, text in settings.items()},
            }
        return wire.write_notice(json.dumps(described))

    @staticmethod
    def _compare(bucket, described, size):
        """Return what this rank needs to know of all ranks; raise an error if settings differ.

        Returns:
            A tuple (largest number of elements that a rank gives, largest step, what the
            communicator of rank 0 knows, or an empty list if that of some rank knows nothing).
            Steps and knowledge differ in elastic training, after ranks have joined.
        """
        ranks = _read(bucket.name, described, size)
        failures = [
            f"rank {rank}: {one['failure']}" for rank, one in enumerate(ranks) if "failure" in one
        ]
        own = bucket.members[0].failure
        if own is not None:
            raise own
        if failures:
            raise PeerFailedError(f"{bucket.name}: {'; '.join(failures)}")
        for what, expected in ranks[0]["settings"].items():
            for rank, one in enumerate(ranks):
                got = one["settings"].get(what)
                if got != expected:
                    raise InvalidArgumentError(
                        f"{bucket.name}: expected the same {what} on all ranks, got {expected} on"
                        f" rank 0 and {got} on rank {rank}"
                    )
        most, step = (max(one[what] for one in ranks) for what in ("count", "step"))
        return most, step, ranks[0]["known"] if all(one["known"] for one in ranks) else []


def _short(text):
    """Shorten a long text; a checksum keeps different texts different."""
    if len(text) <= _LONGEST_SETTING:
        return text
    return f"{text[:_LONGEST_SETTING]}... (CRC-32 {zlib.crc32(text.encode()):08x})"


def _read(name, described, size):
    """Return the descriptions of all ranks; check the bytes, which come from other processes."""
    messages = wire.split(described)
    texts = [messages.notices.get(number) for number in range(len(messages))]
    try:
        ranks = [json.loads(text) for text in texts]
        good = len(ranks) == size and all(
            isinstance(one, dict)
            and (
                isinstance(one.get("failure"), str)
                or (
                    all(type(one.get(what)) is int for what in ("count", "step"))
                    and isinstance(one.get("settings"), dict)
                    and isinstance(one.get("known"), list)
                    and all(is_number(part) and 0 <= part < math.inf for part in one["known"])
                )
            )
            for one in ranks
        )
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise CorruptPayloadError(
            f"{name}: expected a description from each of {size} ranks, got {texts!r:.200}"
        )
    return ranks


class VectorExchange(Exchange):
    """An exchange that ends if a collective fails, so that others can go on.

    The error is raised where the result of this exchange is asked for.
    """

    def advance(self) -> bool:
        try:
            return super().advance()
        except Exception as error:
            self.error, self.done = error, True
            return True
