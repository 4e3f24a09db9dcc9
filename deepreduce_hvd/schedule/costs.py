"""What an exchange costs: bytes and messages per communicator, and seconds on a link.

A link is described by seconds per message (latency, alpha) and seconds per byte (beta), or by
tables of measured seconds. docs/schedule.md lists the formulas.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from deepreduce_hvd.communicators.auto import costs, message_bytes
from deepreduce_hvd.communicators.doubling import folded
from deepreduce_hvd.container import HEADER
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.settings import is_integer, is_number

#: Seconds per message of a link of which only the rate is known.
DEFAULT_LATENCY = 1e-4
#: The communicators that :func:`traffic` knows.
COMMUNICATORS = (
    "Allreduce", "Allgather", "SplitAllgather", "RecursiveDoubling", "GTopK", "GTopK tree", "CLTK", "SharedRandomK"
)  # fmt: skip
_PROBE_VALUES = 2  # that CLTK and SharedRandomK send with their values
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": -9, "us": -6, "ms": -3, "s": 0}  # powers of ten


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one exchange, along its longest chain of messages.

    This is what the busiest rank receives, with one exception: if the number of ranks is not a
    power of two, the exchanges between pairs end with a message to ranks that receive nothing else.

    Attributes:
        collectives: the number of collectives that all ranks enter together.
        messages: the number of messages that follow one another.
        received_bytes: the bytes of these messages.
    """

    collectives: int
    messages: int
    received_bytes: float

    def seconds(self, latency: float, seconds_per_byte: float) -> float:
        """Return messages * latency + received bytes * seconds per byte."""
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

    >>> traffic("Allreduce", 0, 1000, 4)
    Traffic(collectives=1, messages=6, received_bytes=6000.0)
    """
    if communicator not in COMMUNICATORS:
        raise InvalidArgumentError(
            f"communicator: expected one of {', '.join(COMMUNICATORS)}, got {communicator!r}"
        )
    if ranks == 1:
        return Traffic(0, 0, 0.0)
    levels = levels_of(ranks)
    power, beyond = folded(ranks)
    folds = 1 if beyond else 0
    if communicator in ("Allreduce", "SharedRandomK", "CLTK"):
        values = d if communicator == "Allreduce" else k + _PROBE_VALUES
        ring = Traffic(1, 2 * (ranks - 1), 2 * (ranks - 1) / ranks * 4 * values)
        if communicator != "CLTK":
            return ring
        indices = HEADER.size + k * _index_bits(k, d) / 8
        return Traffic(2, ring.messages + levels, ring.received_bytes + indices)
    if communicator in ("GTopK", "GTopK tree"):
        message = message_bytes(k, d, value_bits)
        if communicator == "GTopK tree":
            return Traffic(levels + 1, 2 * levels, levels * message)
        return Traffic(levels + 1 + folds, 2 * levels + folds, (levels + folds) * message)
    received = costs(k, d, ranks, 0.0, 1.0, value_bits)[communicator]
    if communicator == "Allgather":
        return Traffic(1, levels, received)
    if communicator == "SplitAllgather":
        return Traffic(2, ranks - 1 + levels, received)
    return Traffic(levels + 1 + folds, 2 * levels + folds, received)


def hierarchical(
    across: Traffic, d: int, ranks_per_host: int, result_bytes: float
) -> tuple[Traffic, Traffic]:
    """Return the traffic of Hierarchical: (within a host, between hosts).

    Args:
        across: the traffic of the communicator between hosts, for one rank per host.
        d: the number of elements of the tensor.
        ranks_per_host: the number of ranks of each host.
        result_bytes: the bytes of the result that the first rank of a host sends to the others.
    """
    if ranks_per_host == 1:
        return Traffic(0, 0, 0.0), across
    steps = 2 * (ranks_per_host - 1)
    reduced = steps / ranks_per_host * 4 * (d + _PROBE_VALUES)
    messages = steps + levels_of(ranks_per_host)
    return Traffic(2, messages, reduced + result_bytes), across


@dataclasses.dataclass(frozen=True)
class Fit:
    """A line alpha + beta * bytes through measured seconds.

    Attributes:
        alpha: seconds at 0 bytes.
        beta: seconds per byte.
        error: the root mean square of (line - measured) / measured.
    """

    alpha: float
    beta: float
    error: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Measured seconds of a collective by bytes.

    Args:
        points: (bytes, seconds) pairs with the bytes ascending.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        good = all(is_number(part) and math.isfinite(part) for point in self.points for part in point)  # fmt: skip
        if len(self.points) < 2 or not good or sizes != sorted(set(sizes)) or sizes[0] < 0:
            raise InvalidArgumentError(
                f"table: expected at least 2 (bytes, seconds) pairs with ascending bytes, got {list(self.points)}"
            )
        if min(seconds for _, seconds in self.points) <= 0:
            raise InvalidArgumentError(f"table: expected seconds above 0, got {list(self.points)}")
        points = tuple((float(size), float(seconds)) for size, seconds in self.points)
        object.__setattr__(self, "points", points)  # integers from a file are the same table

    def seconds(self, size: Any) -> Any:
        """Return the seconds of a size, or of an (n,) array of sizes.

        The table is linear between its points. Above the last point it goes on with the slope of
        the fit. Below the first it is constant.
        """
        sizes, seconds = np.array(self.points).T
        beyond = np.maximum(np.asarray(size, dtype=np.float64) - sizes[-1], 0.0)
        return np.interp(size, sizes, seconds) + beyond * self.fit().beta

    def fit(self) -> Fit:
        """Return the line of least squares of the relative error, with alpha and beta >= 0."""
        sizes, seconds = np.array(self.points).T
        rows = np.stack([1 / seconds, sizes / seconds], axis=1)  # relative: small sizes count too
        solution = np.linalg.lstsq(rows, np.ones(sizes.size), rcond=None)[0]
        if solution.min() < 0:
            column = int(np.argmax(solution))
            alone = float(rows[:, column].sum() / (rows[:, column] ** 2).sum())
            solution = np.array([alone if index == column else 0.0 for index in range(2)])
        error = float(np.sqrt(np.mean((rows @ solution - 1) ** 2)))
        return Fit(float(solution[0]), float(solution[1]), error)


@dataclasses.dataclass(frozen=True)
class Link:
    """The network between hosts.

    Attributes:
        name: a name for tables, such as "1gbit".
        gather_latency: seconds per message of an allgather and of the exchanges between pairs.
        gather_seconds_per_byte: seconds per byte that a rank receives in these.
        reduce_latency: seconds per message of a dense allreduce.
        reduce_seconds_per_byte: seconds per byte that a rank receives in it.
        gather_table: measured seconds of an allgather, by the bytes of one rank's payload.
        reduce_table: measured seconds of a dense allreduce, by the bytes of the tensor.
        measured_hosts: the number of hosts of the tables; 0 if there are none.
        measured_ranks_per_host: their number of ranks per host.
    """

    name: str
    gather_latency: float
    gather_seconds_per_byte: float
    reduce_latency: float
    reduce_seconds_per_byte: float
    gather_table: Table | None = None
    reduce_table: Table | None = None
    measured_hosts: int = 0
    measured_ranks_per_host: int = 1

    @classmethod
    def of_rate(
        cls,
        name: str,
        bits_per_second: float,
        gather_latency: float = DEFAULT_LATENCY,
        reduce_latency: float | None = None,
    ) -> "Link":
        """Return a link with a rate in bits per second and seconds per message."""
        per_byte = 8 / bits_per_second
        if reduce_latency is None:
            reduce_latency = gather_latency
        return cls(name, gather_latency, per_byte, reduce_latency, per_byte)

    @classmethod
    def of_tables(cls, gather: Table, reduce: Table, hosts: int, ranks_per_host: int) -> "Link":
        """Return a link from measured tables; its constants are those of their fits."""
        ranks = hosts * ranks_per_host
        of_gather, of_reduce = gather.fit(), reduce.fit()
        return cls(
            "measured",
            of_gather.alpha / levels_of(ranks),
            of_gather.beta / (ranks - ranks_per_host),
            of_reduce.alpha / (2 * (ranks - 1)),
            of_reduce.beta / (2 * (ranks - 1) / ranks),
            gather,
            reduce,
            hosts,
            ranks_per_host,
        )

    @classmethod
    def parse(cls, text: str, like: "Link | None" = None) -> "Link":
        """Return the link of a text such as "1gbit", "100mbit" or "10gbit:25us".

        Args:
            text: a rate, and after a colon optionally the seconds per message.
            like: the link that gives the seconds per message if the text does not.

        >>> Link.parse("1gbit:50us").gather_seconds_per_byte
        8e-09
        """
        units, times = "|".join(_RATES), "|".join(_TIMES)
        found = re.fullmatch(
            rf"(\d+(?:\.\d*)?)({units})(?::(\d+(?:\.\d*)?)({times}))?", text.strip().lower()
        )
        if not found or float(found[1]) == 0:
            raise InvalidArgumentError(
                f"link: expected a rate such as 100mbit, 1gbit or 10gbit:25us, got {text!r}"
            )
        rate = float(found[1]) * _RATES[found[2]]
        if found[3]:
            return cls.of_rate(text, rate, float(f"{found[3]}e{_TIMES[found[4]]}"))
        if like is None:
            return cls.of_rate(text, rate)
        return cls.of_rate(text, rate, like.gather_latency, like.reduce_latency)


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts on a link. Transfers within a host are counted as free.

    All ranks of a host share its link. A ring enters and leaves each host once, so an allreduce
    does not depend on the ranks per host otherwise.
    """

    hosts: int
    link: Link
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        for what in ("hosts", "ranks_per_host"):
            if not is_integer(getattr(self, what)) or getattr(self, what) < 1:
                raise InvalidArgumentError(
                    f"network {what}: expected an integer of at least 1, got {getattr(self, what)!r}"
                )

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return self.hosts * self.ranks_per_host

    @property
    def _is_measured(self) -> bool:
        measured = (self.link.measured_hosts, self.link.measured_ranks_per_host)
        return (self.hosts, self.ranks_per_host) == measured

    @property
    def gather_line(self) -> tuple[float, float]:
        """(seconds, seconds per byte of one rank's payload) of an allgather."""
        if self.hosts == 1:
            return 0.0, 0.0
        others = self.ranks - self.ranks_per_host
        link = self.link
        return levels_of(self.ranks) * link.gather_latency, others * link.gather_seconds_per_byte

    @property
    def reduce_line(self) -> tuple[float, float]:
        """(seconds, seconds per byte of the tensor) of a dense allreduce."""
        if self.hosts == 1:
            return 0.0, 0.0
        steps = 2 * (self.ranks - 1)
        link = self.link
        return steps * link.reduce_latency, steps / self.ranks * link.reduce_seconds_per_byte

    def allgather(self, size: Any) -> Any:
        """Return the seconds in which all ranks get the payloads of all, ``size`` bytes each.

        Args:
            size: bytes of one rank's payload, a number or an (n,) array.
        """
        if self._is_measured and self.link.gather_table is not None:
            return self.link.gather_table.seconds(size)
        alpha, beta = self.gather_line
        return alpha + beta * size

    def allreduce(self, size: Any) -> Any:
        """Return the seconds of a dense allreduce of ``size`` bytes, a number or an (n,) array."""
        if self._is_measured and self.link.reduce_table is not None:
            return self.link.reduce_table.seconds(size)
        alpha, beta = self.reduce_line
        return alpha + beta * size

    def exchange(self, communicator: str, k: float, d: float, payload: float) -> float:
        """Return the seconds of an exchange by a communicator.

        Args:
            communicator: one of :data:`COMMUNICATORS`.
            k: the number of elements that each rank selects.
            d: the number of elements of the tensor or of the bucket.
            payload: bytes of one rank's payload; it gives the bits per value.
        """
        if self.hosts == 1:
            return 0.0
        if communicator == "Allgather":
            return float(self.allgather(payload))
        if communicator == "Allreduce":
            return float(self.allreduce(4 * d))
        counted = traffic(communicator, k, d, self.ranks, value_bits_of(payload, k, d))
        # what the ranks of one host receive from other hosts, through one link
        share = (self.ranks - self.ranks_per_host) / (self.ranks - 1) * self.ranks_per_host
        per_byte = share * self.link.gather_seconds_per_byte
        return counted.seconds(self.link.gather_latency, per_byte)


def _index_bits(k: float, d: float) -> float:
    """Return the bits per index of k random elements of d, close to the information bound."""
    return math.log2(d / k) + 1 / math.log(2) if k < d else 0.0


def value_bits_of(payload: float, k: float, d: float) -> float:
    """Return the bits per value with which a message of k of d elements has ``payload`` bytes.

    The inverse of :func:`deepreduce_hvd.communicators.auto.message_bytes`.
    """
    if k <= 0:
        return 0.0
    bits = 8 * (payload - HEADER.size)
    return max(bits / k - _index_bits(k, d), bits / d, 0.0)


def speedup_bound(forward: float, backward: float, exchange: float) -> float:
    """Return the largest speed-up that overlapping backward and exchange can give.

    With r = exchange / backward the bound is 1 + 1 / (forward / min(exchange, backward) +
    max(r, 1 / r)): the time of a step without overlap over that with complete overlap.

    >>> speedup_bound(0.0, 1.0, 1.0)
    2.0
    """
    shorter, longer = sorted((backward, exchange))
    if shorter == 0:
        return 1.0
    return 1 + 1 / (forward / shorter + longer / shorter)
