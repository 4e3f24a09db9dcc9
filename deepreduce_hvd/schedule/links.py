"""Links between hosts: seconds of an exchange, from measured tables or from latency and rate."""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import is_number
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.costs import Traffic, levels_of, traffic, value_bits_of
from deepreduce_hvd.schedule.fields import expect, set_fields, text_of
from deepreduce_hvd.schedule.tables import Table

#: Seconds per message of a link of which only the rate is known.
DEFAULT_LATENCY = 1e-4
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": -9, "us": -6, "ms": -3, "s": 0}  # powers of ten


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
        half_table: measured seconds of an allreduce of float16, by the bytes of the tensor. Without
            it, float16 takes as long per byte as float32.
        measured_hosts: the number of hosts of the tables; 0 if there are none.
        measured_ranks_per_host: their number of ranks per host.
        gather_overlap: seconds at the end of each allgather in which the next one can already be
            under way, between the measured hosts.
        more_seconds_per_half_byte: by how many seconds per byte that a rank receives a sum of
            float16 takes longer than one of float32.
    """

    name: str
    gather_latency: float
    gather_seconds_per_byte: float
    reduce_latency: float
    reduce_seconds_per_byte: float
    gather_table: Table | None = None
    reduce_table: Table | None = None
    half_table: Table | None = None
    measured_hosts: int = 0
    measured_ranks_per_host: int = 1
    gather_overlap: float = 0.0
    more_seconds_per_half_byte: float = 0.0

    def __post_init__(self) -> None:
        text_of(vars(self), "name", "link")
        set_fields(
            self,
            f"link {self.name}",
            (
                "gather_latency", "gather_seconds_per_byte", "reduce_latency",
                "reduce_seconds_per_byte", "gather_overlap", "more_seconds_per_half_byte",
            ),
            {"measured_hosts": 0, "measured_ranks_per_host": 1},
        )  # fmt: skip

    @classmethod
    def of_rate(
        cls,
        name: str,
        bits_per_second: float,
        gather_latency: float = DEFAULT_LATENCY,
        reduce_latency: float | None = None,
    ) -> "Link":
        """Return a link of which the rate and the latency are known.

        Args:
            name: the name of the link.
            bits_per_second: the rate.
            gather_latency: seconds per message of an allgather.
            reduce_latency: seconds per message of a dense allreduce. The default is
                ``gather_latency``.

        Returns:
            A :class:`Link` without tables.

        Raises:
            InvalidArgumentError: the rate is not above 0, or the seconds are negative.
        """
        good = is_number(bits_per_second) and 0 < bits_per_second < math.inf
        expect(good, f"link {name} rate", "bits per second above 0", bits_per_second)
        per_byte = 8 / bits_per_second
        if reduce_latency is None:
            reduce_latency = gather_latency
        return cls(name, gather_latency, per_byte, reduce_latency, per_byte)

    @classmethod
    def of_tables(
        cls,
        gather: Table,
        reduce: Table,
        hosts: int,
        ranks_per_host: int,
        half: Table | None = None,
        gather_overlap: float = 0.0,
    ) -> "Link":
        """Return a link from measured tables; its constants are those of their fits.

        Args:
            gather: measured seconds of an allgather, by the bytes of one rank's payload.
            reduce: measured seconds of a dense allreduce, by the bytes of the tensor.
            hosts: the number of hosts on which they were measured, at least 2.
            ranks_per_host: the number of ranks of each host.
            half: measured seconds of an allreduce of float16, by the bytes of the tensor, or None.
            gather_overlap: seconds at the end of an allgather in which the next one can already be
                under way.

        Returns:
            A :class:`Link` named "measured".
        """
        ranks = hosts * ranks_per_host
        of_gather, of_reduce = gather.fit(), reduce.fit()
        shares = 2 * (ranks - 1) / ranks  # a rank receives so many times the bytes of a tensor
        more = 0.0 if half is None else max(half.fit().beta - of_reduce.beta, 0.0)
        return cls(
            "measured",
            of_gather.alpha / levels_of(ranks),
            of_gather.beta / (ranks - ranks_per_host),
            of_reduce.alpha / (2 * (ranks - 1)),
            of_reduce.beta / shares,
            gather,
            reduce,
            half,
            hosts,
            ranks_per_host,
            gather_overlap,
            more / shares,
        )

    @classmethod
    def parse(cls, text: str, like: "Link | None" = None) -> "Link":
        """Return the link of a text such as "1gbit", "100mbit" or "10gbit:25us".

        Args:
            text: a rate, and after a colon optionally the seconds per message.
            like: the measured link of the same hosts, or None. It gives the seconds per message if
                the text does not, and what float16 takes in addition.

        Returns:
            A :class:`Link` whose name is the text.

        Raises:
            InvalidArgumentError: the text is not such a rate.

        >>> Link.parse("1gbit:50us").gather_seconds_per_byte
        8e-09
        """
        expect(isinstance(text, str), "link", "text such as 100mbit or 10gbit:25us", text)
        units, times = "|".join(_RATES), "|".join(_TIMES)
        found = re.fullmatch(
            rf"(\d+(?:\.\d*)?)({units})(?::(\d+(?:\.\d*)?)({times}))?",
            text.strip().lower(),
            re.ASCII,
        )
        if not found or float(found[1]) == 0:
            raise InvalidArgumentError(
                f"link: expected a rate such as 100mbit, 1gbit or 10gbit:25us, got {text!r}"
            )
        rate = float(found[1]) * _RATES[found[2]]
        name = text.strip()
        if found[3]:
            link = cls.of_rate(name, rate, float(f"{found[3]}e{_TIMES[found[4]]}"))
        elif like is None:
            link = cls.of_rate(name, rate)
        else:
            link = cls.of_rate(name, rate, like.gather_latency, like.reduce_latency)
        if like is None:
            return link
        more = like.more_seconds_per_half_byte
        return dataclasses.replace(link, more_seconds_per_half_byte=more)


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts on a link. Transfers within a host are counted as free.

    All ranks of a host share its link. A ring enters and leaves each host once, so an allreduce
    does not depend on the ranks per host otherwise.

    Args:
        hosts: the number of hosts, at least 1.
        link: the link between them.
        ranks_per_host: the number of ranks of each host, at least 1.

    Raises:
        InvalidArgumentError: a number is not an integer of at least 1, or ``link`` is not a link.
    """

    hosts: int
    link: Link
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        good = isinstance(self.link, Link)
        expect(good, "network link", "a Link, such as Link.parse('1gbit')", self.link)
        set_fields(self, "network", (), {"hosts": 1, "ranks_per_host": 1})

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
        """Return the seconds of an allgather of ``size`` bytes per rank.

        Args:
            size: bytes of one rank's payload, a number or an (n,) array.

        Returns:
            Seconds, in the shape of ``size``.
        """
        if self._is_measured and self.link.gather_table is not None:
            return self.link.gather_table.seconds(size)
        alpha, beta = self.gather_line
        return alpha + beta * size

    def gather_occupied(self, size: Any) -> Any:
        """Return the seconds of an allgather until the next one can start.

        Args:
            size: bytes of one rank's payload, a number or an (n,) array.

        Returns:
            Seconds, in the shape of ``size``.
        """
        overlap = self.link.gather_overlap if self._is_measured else 0.0
        return np.maximum(self.allgather(size) - overlap, 0.0)

    def largest_payload(self, seconds: float) -> float:
        """Return the largest payload whose allgather needs at most some seconds.

        Args:
            seconds: the seconds.

        Returns:
            Bytes of one rank's payload. -1 if every payload needs more, infinity if none does.
        """
        if self._is_measured and self.link.gather_table is not None:
            return self.link.gather_table.largest(seconds)
        alpha, beta = self.gather_line
        if seconds < alpha:
            return -1.0
        return (seconds - alpha) / beta if beta > 0 else math.inf

    def allreduce(self, size: Any, half: bool = False) -> Any:
        """Return the seconds of a dense allreduce.

        Args:
            size: bytes, a number or an (n,) array.
            half: whether the elements are float16. CPUs take longer per byte to sum them.

        Returns:
            Seconds, in the shape of ``size``.
        """
        table = (half and self.link.half_table) or self.link.reduce_table
        if self._is_measured and table is not None:
            return table.seconds(size)
        alpha, beta = self.reduce_line
        if half and self.hosts > 1:
            # what a byte of float16 takes in addition, on each rank, does not depend on the network
            beta += self.link.more_seconds_per_half_byte * 2 * (self.ranks - 1) / self.ranks
        return alpha + beta * size

    def exchange(self, communicator: str, k: float, d: float, payload: float) -> float:
        """Return the seconds of an exchange by a communicator.

        Args:
            communicator: one of :data:`~deepreduce_hvd.schedule.costs.COMMUNICATORS`.
            k: the number of elements that each rank selects.
            d: the number of elements of the tensor or of the bucket.
            payload: bytes of one rank's payload; it gives the bits per value.

        Returns:
            Seconds.

        Raises:
            InvalidArgumentError: an unknown communicator.
        """
        if self.hosts == 1:
            return 0.0
        if communicator == "Allgather":
            return float(self.allgather(payload))
        if communicator == "Allreduce":
            return float(self.allreduce(4 * d))
        counted = self._traffic(communicator, k, d, payload)
        # what the ranks of one host receive from other hosts, through one link
        share = (self.ranks - self.ranks_per_host) / (self.ranks - 1) * self.ranks_per_host
        per_byte = share * self.link.gather_seconds_per_byte
        return counted.seconds(self.link.gather_latency, per_byte)

    def received(self, communicator: str, k: float, d: float, payload: float) -> float:
        """Return the bytes that a rank receives in an exchange.

        Args:
            communicator, k, d, payload: as for :meth:`exchange`.

        Returns:
            Bytes.

        Raises:
            InvalidArgumentError: an unknown communicator.
        """
        if communicator == "Allgather":
            return (self.ranks - 1) * payload
        return self._traffic(communicator, k, d, payload).received_bytes

    def _traffic(self, communicator: str, k: float, d: float, payload: float) -> Traffic:
        return traffic(communicator, k, d, self.ranks, value_bits_of(payload, k, d))
