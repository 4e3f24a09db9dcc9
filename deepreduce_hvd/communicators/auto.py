"""Auto: select the communicator that a cost model predicts to be fastest, for each bucket."""

import math
import time
from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.communicators.allgather import Allgather
from deepreduce_hvd.communicators.base import Communicator, Transport
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.doubling import folded
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.recursive_doubling import RecursiveDoubling
from deepreduce_hvd.communicators.split_allgather import SplitAllgather
from deepreduce_hvd.communicators.sums import BucketSum, GatheredPayloads
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.recent import Recent

if TYPE_CHECKING:
    from deepreduce_hvd.communicators.given_vectors import GivenVector

#: {name: communicator} of those that sum exactly what every rank sends
EXACT_SUMS: dict[str, Communicator] = {
    "Allgather": Allgather(),
    "SplitAllgather": SplitAllgather(),
    "RecursiveDoubling": RecursiveDoubling(),
}
_PROBE_BYTES = 1 << 20
_REPEATS = 7
#: Steps between two counts of the union, for a communicator that does not count it anyway.
_COUNT_UNION_EVERY = 100
#: Kinds of vectors of which Auto remembers the last sum. A program can give each vector a new name.
_MOST_KINDS = 1024


def index_bits(count, d):
    """Return bits per index for ``count`` random elements of ``d``, near the information bound."""
    return math.log2(d / count) + 1 / math.log(2) if 0 < count < d else 0.0


def message_bytes(count, d, value_bits):
    """Return an estimate of the size of a payload in bytes.

    The estimate is the header, indices close to the information bound, and values, but never more
    than sending all elements.

    Args:
        count: the number of elements in the payload.
        d: the number of elements of the tensor.
        value_bits: bits per value.
    """
    if count <= 0 or d <= 0:
        return container.HEADER.size
    bits = min(count * (index_bits(count, d) + value_bits), d * value_bits)
    return container.HEADER.size + bits / 8


def union_of(k, d, sets):
    """Return the expected number of elements in the union of random sets.

    The formula is d (1 - (1 - k / d)^P), from SparCML.

    Args:
        k: the number of elements of each set.
        d: the number of elements to choose from.
        sets: the number of sets, P.
    """
    return d * -math.expm1(sets * math.log1p(-k / d)) if k < d else d


def costs(k, d, size, latency, seconds_per_byte, value_bits, union=None):
    """Return {communicator: predicted seconds} for those that sum exactly what ranks send.

    Args:
        k: the number of elements that one rank sends.
        d: the number of elements of the tensor.
        size: the number of ranks.
        latency: seconds per collective.
        seconds_per_byte: seconds per byte that a rank receives.
        value_bits: bits per value.
        union: the number of elements of the sum, if it is known from an earlier step. None assumes
            that ranks choose at random.
    """
    k = max(min(k, d), 1)
    union = union_of(k, d, size) if union is None else min(max(union, k), d)
    # the number of independent random sets with this union: 1 if all ranks send the same elements,
    # P if they choose at random
    independent = (
        math.log1p(-union / d) / math.log1p(-k / d)
        if k < union < d
        else (1.0 if union == k else size)
    )
    power, beyond = folded(size)
    levels = power.bit_length() - 1
    # with more than two ranks, the last round reports failures
    doubling_bytes, rounds = 0.0, levels + (1 if size > 2 else 0)
    for level in range(levels):
        met = independent ** (level / max(math.log2(size), 1))
        doubling_bytes += message_bytes(union_of(k, d, met), d, value_bits)
    if beyond:
        doubling_bytes += message_bytes(k, d, value_bits) + message_bytes(union, d, value_bits)
        rounds += 2
    split_bytes = (size - 1) * (
        message_bytes(k / size, d / size, value_bits)
        + message_bytes(union / size, d / size, value_bits)
    )
    return {
        "Allgather": latency + seconds_per_byte * (size - 1) * message_bytes(k, d, value_bits),
        "SplitAllgather": 2 * latency + seconds_per_byte * split_bytes,
        "RecursiveDoubling": rounds * latency + seconds_per_byte * doubling_bytes,
    }


class _Links(NamedTuple):
    """What a group of ranks has measured.

    Attributes:
        latency: seconds per collective.
        seconds_per_byte: seconds per byte that a rank receives.
    """

    latency: float
    seconds_per_byte: float


class _Facts:
    """What all ranks of a group know alike, on which their choices depend.

    Attributes:
        links: the latency and the bandwidth.
        unions: {key of a bucket: number of elements of its last sum}.
        counts: {key of a bucket: average number of elements that a rank sends}.
    """

    def __init__(self, links: _Links) -> None:
        self.links = links
        self.unions: dict[str, int] = {}
        self.counts: dict[str, float] = {}


class _VectorFacts:
    """What this rank knows about a group and its sums of vectors.

    The sums can end in another order on each rank, so ranks may know different things. Each
    exchange uses what rank 0 knew when it began.

    Attributes:
        links: the latency and the bandwidth.
        sums: {kind of a vector: (number of elements of a sum, number of sums)}; only on rank 0.
    """

    def __init__(self, links: _Links) -> None:
        self.links = links
        self.sums: Recent[Hashable, tuple[int, int]] = Recent(_MOST_KINDS)


def _measure(channel):
    """Measure the links of a group of ranks; a generator of collectives, like an exchange.

    Returns:
        The :class:`_Links` that rank 0 measured, on all ranks, so that they make the same choice.
    """
    probe = int(min(_PROBE_BYTES * channel.size, channel.transport.most_bytes) // channel.size)
    medians = []
    for size in (1, probe):
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            yield channel.allgather(np.zeros(size, dtype=np.uint8))
            seconds.append(time.perf_counter() - started)
        medians.append(float(np.median(seconds)))
    latency, large = medians
    per_byte = max(large - latency, 0.0) / (probe * max(channel.size - 1, 1))
    own = np.array([latency, per_byte]).view(np.uint8) if channel.rank == 0 else None
    agreed = yield channel.broadcast(own, 0)
    return _Links(*np.array(agreed).view(np.float64).tolist())


def _result_of(steps, transport):
    """Run a generator of collectives, waiting for each of them; return its result."""
    result = None
    while True:
        try:
            result = transport.wait(steps.send(result))
        except StopIteration as stop:
            return stop.value


class Auto(Communicator):
    """Communicator that uses the fastest of three others for each bucket (``communicator="auto"``).

    The choice is between :class:`Allgather`, :class:`SplitAllgather` and
    :class:`RecursiveDoubling`. All three sum what every rank sends. With lossless values, the
    choice does not change the training, apart from rounding. With others, it does, because
    :class:`SplitAllgather` and :class:`RecursiveDoubling` encode sums again. The choice depends
    only on facts that all ranks know: the number of elements sent, the number of ranks, the size of
    an earlier sum, and the latency and bandwidth that rank 0 measured before the first exchange.
    ``stats()`` gives the reason for each choice.

    :class:`GTopK`, :class:`CLTK` and :class:`SharedRandomK` select elements differently, so Auto
    does not use them.
    """

    def __init__(self) -> None:
        # of each group of global ranks; a number of ranks would not tell process sets apart
        self._facts: dict[tuple[int, ...], _Facts] = {}
        self._vector_facts: dict[tuple[int, ...], _VectorFacts] = {}

    def __repr__(self) -> str:
        return "Auto()"

    def reset(self) -> None:
        self._facts, self._vector_facts = {}, {}

    def prepare(self, transport: Transport) -> None:
        ranks = tuple(transport.ranks)
        if ranks not in self._facts:
            steps = _measure(Channel(transport, "deepreduce.measure"))
            self._facts[ranks] = _Facts(_result_of(steps, transport))

    def known(self, bucket: "GivenVector", transport: Transport) -> list[float]:
        facts = self._vector_facts.get(tuple(transport.ranks))
        if facts is None:
            return []
        return [*facts.links, *facts.sums.get(bucket.kind, ())[:1]]

    @staticmethod
    def choose(
        bucket: Bucket, size: int, links: _Links, count: float | None, union: float | None
    ) -> tuple[str, str]:
        """Choose the communicator of one bucket.

        Args:
            bucket: the bucket.
            size: the number of ranks.
            links: the latency and the bandwidth of these ranks.
            count: the average number of elements that a rank sent in an earlier step, if known. It
                matters only if the sparsifier does not say how many it selects.
            union: the number of elements of an earlier sum, if known.

        Returns:
            A tuple (class name of the communicator, text with the reason).
        """
        counts = [
            bucket.codec.sparsifier.most_selected(member.d, bucket.step)
            for member in bucket.members
        ]
        k = count if None in counts else sum(counts)
        if k is None:
            return "Allgather", "k is not known before the first exchange"
        predicted = costs(k, bucket.d, size, *links, bucket.codec.value.bits_per_value(), union)
        best = min(predicted, key=predicted.get)
        times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in predicted.items())
        return (
            best,
            (
                f"{times} predicted for k = {k:.0f} of d = {bucket.d}, P = {size},"
                f" {1e3 * links.latency:.3f} ms per collective, {1e9 * links.seconds_per_byte:.3f}"
                f" ns per byte, union {'not known yet' if union is None else union}"
            ),
        )

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        # kept to the end: ranks forget the facts at different moments
        facts = self._facts[tuple(channel.transport.ranks)]
        key = channel.prefix  # several compressors may share this object
        total = yield from self._fastest(
            bucket, channel, facts.links, facts.counts.get(key), facts.unions.get(key)
        )
        if not _is_void(bucket, total):
            decodes = isinstance(total, GatheredPayloads)
            if not decodes or key not in facts.unions or bucket.step % _COUNT_UNION_EVERY == 0:
                facts.unions[key] = _elements_of(bucket, total)
                if decodes:
                    facts.counts[key] = _sent_of(bucket, total) / channel.size
        return total

    def exchange_vector(
        self, bucket: "GivenVector", channel: Channel, known: list[float]
    ) -> Generator[Any, Any, BucketSum]:
        # As part of this exchange, under its name: sums that are in flight together each measure
        # for themselves, and no rank waits in one of them for a rank that waits in another.
        links = _Links(*known[:2]) if known else (yield from _measure(channel))
        union = known[2] if len(known) > 2 else None
        total = yield from self._fastest(bucket, channel, links, None, union)
        ranks = tuple(channel.transport.ranks)
        if not known:
            self._vector_facts[ranks] = _VectorFacts(links)
        if channel.rank == 0 and not _is_void(bucket, total):
            sums = self._vector_facts.setdefault(ranks, _VectorFacts(links)).sums
            elements, number = sums.get(bucket.kind, (0, 0))
            if not isinstance(total, GatheredPayloads) or number % _COUNT_UNION_EVERY == 0:
                elements = _elements_of(bucket, total)
            sums[bucket.kind] = elements, number + 1
        return total

    def _fastest(self, bucket, channel, links, count, union):
        best, why = self.choose(bucket, channel.size, links, count, union)
        bucket.scheme = f"{best}: {why}"
        return (yield from EXACT_SUMS[best].exchange(bucket, channel))


def _is_void(bucket, total):
    """Return whether the sum of a member is not finite."""
    return any(total.non_finite(number) for number in range(len(bucket.members)))


def _elements_of(bucket, total):
    """Return the number of elements of a sum. Payloads have to be decoded for it."""
    if not isinstance(total, GatheredPayloads):
        return total.sparse_sum.indices.size
    return sum(total.sparse(number, 1.0)[0].size for number in range(len(bucket.members)))


def _sent_of(bucket, total):
    """Return the number of elements in the payloads of all ranks."""
    return sum(
        _native.inspect(payload)["count"]
        for number in range(len(bucket.members))
        for payload in total.payloads(number)
    )
