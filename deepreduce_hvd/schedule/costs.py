"""What an exchange costs: messages and bytes of each communicator. docs/schedule.md has a table."""

import dataclasses

from deepreduce_hvd.communicators.auto import costs, index_bits, message_bytes
from deepreduce_hvd.communicators.doubling import folded
from deepreduce_hvd.container import HEADER
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.fields import integer_of
from deepreduce_hvd.schedule.grouping import expect_non_negative

#: The communicators that :func:`traffic` knows.
COMMUNICATORS = (
    "Allreduce", "Allgather", "SplitAllgather", "RecursiveDoubling", "GTopK", "GTopK tree", "CLTK",
    "SharedRandomK"
)  # fmt: skip
_PROBE_VALUES = 2  # that CLTK and SharedRandomK send with their values


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one exchange on its critical path, the longest chain of dependent messages.

    This is what the busiest rank receives, with two exceptions. If the number of ranks is not a
    power of two, the exchanges between pairs end with a message to ranks that receive nothing else.
    The messages of a broadcast follow those of a reduction, but arrive at other ranks.

    Attributes:
        collectives: the number of collectives that all ranks enter together.
        messages: the number of messages on the critical path.
        received_bytes: the bytes of these messages.
    """

    collectives: int
    messages: int
    received_bytes: float

    def seconds(self, latency: float, seconds_per_byte: float) -> float:
        """Return messages * latency + received bytes * seconds per byte.

        Args:
            latency: seconds per message.
            seconds_per_byte: seconds per received byte.

        Returns:
            Seconds.
        """
        return self.messages * latency + self.received_bytes * seconds_per_byte


def levels_of(ranks: int) -> int:
    """Return ceil(log2 P), the number of levels of a tree of P ranks."""
    return (ranks - 1).bit_length()


def traffic(communicator: str, k: float, d: float, ranks: int, value_bits: float = 32.0) -> Traffic:
    """Return the traffic of a communicator, if ranks select random elements independently.

    The sizes of messages are those of :func:`deepreduce_hvd.communicators.auto.message_bytes`. An
    allreduce is a ring.

    Args:
        communicator: one of :data:`COMMUNICATORS`; "Allreduce" sends all elements as float32.
        k: the number of elements that each rank selects.
        d: the number of elements of the tensor.
        ranks: the number of ranks, P.
        value_bits: bits per value in a payload.

    Returns:
        The traffic of one exchange.

    Raises:
        InvalidArgumentError: an unknown communicator, or a number that is negative or not finite.

    >>> traffic("Allreduce", 0, 1000, 4)
    Traffic(collectives=1, messages=6, received_bytes=6000.0)
    """
    if communicator not in COMMUNICATORS:
        raise InvalidArgumentError(
            f"communicator: expected one of {', '.join(COMMUNICATORS)}, got {communicator!r}"
        )
    expect_non_negative("traffic", k=k, d=d, value_bits=value_bits)
    ranks = integer_of({"ranks": ranks}, "ranks", "traffic", 1)
    if ranks == 1:
        return Traffic(0, 0, 0.0)
    levels = levels_of(ranks)
    _, beyond = folded(ranks)
    folds = 1 if beyond else 0
    reports = 1 if ranks > 2 else 0  # collectives of the pairs that report failures
    pairs = levels + reports + folds, (1 + reports) * levels + folds
    if communicator in ("Allreduce", "SharedRandomK", "CLTK"):
        values = d if communicator == "Allreduce" else k + _PROBE_VALUES
        ring = Traffic(1, 2 * (ranks - 1), 2 * (ranks - 1) / ranks * 4 * values)
        if communicator != "CLTK":
            return ring
        indices = HEADER.size + k * index_bits(k, d) / 8
        return Traffic(2, ring.messages + levels, ring.received_bytes + indices)
    if communicator in ("GTopK", "GTopK tree"):
        message = message_bytes(k, d, value_bits)
        if communicator == "GTopK tree":
            return Traffic(levels + 1, 2 * levels, 2 * levels * message)
        return Traffic(*pairs, (levels + folds) * message)
    received = costs(k, d, ranks, 0.0, 1.0, value_bits)[communicator]
    if communicator == "Allgather":
        return Traffic(1, levels, received)
    if communicator == "SplitAllgather":
        return Traffic(2, ranks - 1 + levels, received)
    return Traffic(*pairs, received)


def hierarchical(
    across: Traffic, d: int, ranks_per_host: int, result_bytes: float
) -> tuple[Traffic, Traffic]:
    """Return the traffic of Hierarchical: (within a host, between hosts).

    Args:
        across: the traffic of the communicator between hosts, for one rank per host.
        d: the number of elements of the tensor.
        ranks_per_host: the number of ranks of each host.
        result_bytes: the bytes of the result that the first rank of a host sends to the others.

    Returns:
        A tuple of two :class:`Traffic`: within a host, and between hosts.

    Raises:
        InvalidArgumentError: a number is negative or not finite, or ``ranks_per_host`` is not an
            integer of at least 1.
    """
    expect_non_negative("hierarchical", d=d, result_bytes=result_bytes)
    ranks_per_host = integer_of(
        {"ranks_per_host": ranks_per_host}, "ranks_per_host", "hierarchical", 1
    )
    if ranks_per_host == 1:
        return Traffic(0, 0, 0.0), across
    steps = 2 * (ranks_per_host - 1)
    reduced = steps / ranks_per_host * 4 * (d + _PROBE_VALUES)
    messages = steps + levels_of(ranks_per_host)
    return Traffic(2, messages, reduced + result_bytes), across


def value_bits_of(payload: float, k: float, d: float) -> float:
    """Return the bits per value of a message that sends k of d elements in ``payload`` bytes.

    The inverse of :func:`deepreduce_hvd.communicators.auto.message_bytes`.
    """
    if k <= 0:
        return 0.0
    bits = 8 * (payload - HEADER.size)
    return max(bits / k - index_bits(k, d), bits / d, 0.0)


def speedup_bound(forward: float, backward: float, exchange: float) -> float:
    """Return the largest speed-up that overlapping backward and exchange can give.

    With r = exchange / backward the bound is 1 + 1 / (forward / min(exchange, backward) +
    max(r, 1 / r)): the time of a step without overlap over that with complete overlap.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        exchange: seconds of the exchange of all gradients.

    Returns:
        The speed-up, from 1 to 2.

    Raises:
        InvalidArgumentError: a number is negative or not finite.

    >>> speedup_bound(0.0, 1.0, 1.0)
    2.0
    """
    expect_non_negative("speedup_bound", forward=forward, backward=backward, exchange=exchange)
    shorter, longer = sorted((backward, exchange))
    if shorter == 0:
        return 1.0
    return 1 + 1 / (forward / shorter + longer / shorter)
