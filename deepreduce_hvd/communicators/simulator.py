"""A simulation of any number of ranks in one process, deterministic and without threads.

It is used in tests and to count traffic.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd.communicators.base import Communicator, Transport
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.exchange import Channel, steps_of
from deepreduce_hvd.errors import InvalidArgumentError


class _Call:
    """A collective that one rank has started."""

    def __init__(
        self, group: tuple[int, ...], kind: str, name: str, data: Any, root: Any = None
    ) -> None:
        self.group = group
        self.kind = kind
        self.name = name
        self.data = data
        self.root = root

    def signature(self) -> tuple[Any, ...]:
        return self.group, self.kind, self.name, self.root


class SimulatedTransport(Transport):
    """The transport of one rank of ``group``; the simulator completes its handles."""

    def __init__(self, group: Sequence[int], rank: int) -> None:
        self.group = tuple(group)
        self.size = len(self.group)
        self.rank = self.group.index(rank)

    @property
    def ranks(self) -> list[int]:
        return list(self.group)

    def by_host(
        self, ranks_per_host: int | None
    ) -> "tuple[SimulatedTransport, SimulatedTransport | None]":
        if ranks_per_host is None or self.size % ranks_per_host:
            raise InvalidArgumentError(
                f"ranks_per_host: expected a divisor of {self.size}, got {ranks_per_host}"
            )
        own = self.group[self.rank]
        first = self.rank // ranks_per_host * ranks_per_host
        leaders = self.group[::ranks_per_host]
        within = SimulatedTransport(self.group[first : first + ranks_per_host], own)
        return within, SimulatedTransport(leaders, own) if own in leaders else None

    def allgather(self, array: np.ndarray, name: str) -> _Call:
        return _Call(self.group, "allgather", name, array)

    def alltoall(self, parts: Sequence[np.ndarray], name: str) -> _Call:
        return _Call(self.group, "alltoall", name, parts)

    def broadcast(self, array: np.ndarray | None, root: int, name: str) -> _Call:
        return _Call(self.group, "broadcast", name, array, root)

    def allreduce(self, array: np.ndarray, name: str) -> _Call:
        return _Call(self.group, "allreduce", name, array)


class PeerGone(RuntimeError):
    """Error of a rank that waits for another rank that has ended, as Horovod reports it."""


class Simulator:
    """A simulation of ``size`` ranks in one process, which also counts the traffic.

    It runs one collective at a time, without threads, so it is deterministic.

    Args:
        size: the number of ranks.

    Attributes:
        received_bytes: (size,) the bytes that each rank receives, for the algorithms that are usual
            with large data. An allgather counts the data of all other ranks, an alltoall the data
            sent to the rank, a broadcast the data (0 at the root), and an allreduce 2 (P - 1) / P
            of the data.
        messages: (size,) the latency of each rank in messages. An allgather or a broadcast counts
            ceil(log2 P), an allreduce twice that, and an alltoall the number of parts that the rank
            receives from others.
        rounds: the number of collectives.
        sent_bytes: (size,) the bytes that each rank hands to collectives, as a compressor counts
            them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.received_bytes = np.zeros(size, dtype=np.int64)
        self.messages = np.zeros(size, dtype=np.int64)
        self.rounds = 0
        self.sent_bytes = np.zeros(size, dtype=np.int64)

    def run(
        self, communicator: Communicator, buckets: Sequence[Bucket], name: str = "exchange"
    ) -> list[Any]:
        """Exchange one bucket per rank.

        Args:
            communicator: a :class:`Communicator`.
            buckets: a list of the :class:`~deepreduce_hvd.communicators.bucket.Bucket` of each
                rank.
            name: the first part of the names of the collectives.

        Returns:
            A list with the result of each rank. A result is what ``communicator.exchange``
            returned, or the exception that it raised.
        """
        ranks = range(self.size)
        channels = [Channel(SimulatedTransport(ranks, rank), name) for rank in ranks]
        generators = [
            steps_of(communicator, bucket, channel) for bucket, channel in zip(buckets, channels)
        ]
        outcomes: list[Any] = [None] * self.size
        calls: dict[int, _Call] = {}
        results: dict[int, Any] = dict.fromkeys(ranks)  # {rank: what to send to its generator next}
        while results or calls:
            for rank in sorted(results):
                try:
                    calls[rank] = generators[rank].send(results[rank])
                except StopIteration as stop:
                    outcomes[rank] = stop.value
                except Exception as error:
                    outcomes[rank] = error
            results = {}
            for group in sorted({call.group for call in calls.values()}):
                together = [calls[rank] for rank in group if rank in calls]
                if len(together) == len(group) and all(call.group == group for call in together):
                    results.update(zip(group, self._perform(group, together)))
            if calls and not results:
                for rank, call in calls.items():
                    outcomes[rank] = PeerGone(
                        f"rank {rank} waits in {call.name} for ranks that have ended or wait"
                        " elsewhere"
                    )
                break
            for rank in results:
                del calls[rank]
        self.sent_bytes += [channel.sent_bytes for channel in channels]
        return outcomes

    def _perform(self, group: tuple[int, ...], calls: list[_Call]) -> list[Any]:
        if len({call.signature() for call in calls}) > 1:
            raise AssertionError(
                "ranks call different collectives:"
                f" {sorted({str(call.signature()) for call in calls})}"
            )
        self.rounds += 1
        return getattr(self, f"_{calls[0].kind}")(list(group), calls)

    def _allgather(self, group: list[int], calls: list[_Call]) -> list[Any]:
        lengths = np.array([call.data.nbytes for call in calls])
        self.received_bytes[group] += lengths.sum() - lengths
        self.messages[group] += _levels(calls)
        return [np.concatenate([call.data for call in calls])] * len(calls)

    def _alltoall(self, group: list[int], calls: list[_Call]) -> list[Any]:
        for sender, call in enumerate(calls):
            for receiver, part in enumerate(call.data):
                if part.size and sender != receiver:
                    self.received_bytes[group[receiver]] += part.nbytes
                    self.messages[group[receiver]] += 1
        return [[call.data[rank] for call in calls] for rank in range(len(calls))]

    def _broadcast(self, group: list[int], calls: list[_Call]) -> list[Any]:
        root = calls[0].root
        data = calls[root].data
        self.received_bytes[group] += data.nbytes * (np.arange(len(calls)) != root)
        self.messages[group] += _levels(calls)
        return [data] * len(calls)

    def _allreduce(self, group: list[int], calls: list[_Call]) -> list[Any]:
        total = calls[0].data.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            for call in calls[1:]:
                total += call.data
        self.received_bytes[group] += round(2 * (len(calls) - 1) / len(calls) * total.nbytes)
        self.messages[group] += 2 * _levels(calls)
        return [total] * len(calls)


def _levels(calls: list[_Call]) -> int:
    return math.ceil(math.log2(len(calls)))
