"""Any number of ranks in one process, deterministic and without threads: for tests, and for counting traffic."""

import math

import numpy as np

from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.communicators.exchange import Channel


class _Call:
    """A collective that one rank has started."""

    def __init__(self, kind, name, data, root=None):
        self.kind = kind
        self.name = name
        self.data = data
        self.root = root

    def signature(self):
        return self.kind, self.name, self.root


class SimulatedTransport(Transport):
    """One rank's transport: its handles are what the simulator works on."""

    def __init__(self, size, rank):
        self.size = size
        self.rank = rank

    def allgather(self, array, name):
        return _Call("allgather", name, array)

    def alltoall(self, parts, name):
        return _Call("alltoall", name, parts)

    def broadcast(self, array, root, name):
        return _Call("broadcast", name, array, root)

    def allreduce(self, array, name):
        return _Call("allreduce", name, array)


class PeerGone(RuntimeError):
    """Another rank ended while this one was waiting for it, as Horovod reports it."""


class Simulator:
    """Runs an exchange on ``size`` ranks, a collective at a time, and counts what each rank does.

    ``received_bytes`` (size,) is by the algorithms that collectives run with large data: everyone else's data in an allgather, what is
    addressed to the rank in an alltoall, the data in a broadcast, 2 (P - 1) / P of it in an allreduce. ``messages`` (size,) is their
    latency: ceil(log2 P) for allgather and broadcast, twice that for allreduce, and the other ranks that it exchanges with in an alltoall.
    ``rounds`` counts collectives.
    """

    def __init__(self, size):
        self.size = size
        self.received_bytes = np.zeros(size, dtype=np.int64)
        self.messages = np.zeros(size, dtype=np.int64)
        self.rounds = 0

    def run(self, communicator, jobs, name="exchange"):
        """Exchanges one job a rank; returns, rank by rank, the sum or the exception that the rank met."""
        generators = [communicator.exchange(job, Channel(SimulatedTransport(self.size, rank), name)) for rank, job in enumerate(jobs)]
        outcomes = [None] * self.size
        results = [None] * self.size
        running = set(range(self.size))
        while running:
            calls = {}
            for rank in sorted(running):
                try:
                    calls[rank] = generators[rank].send(results[rank])
                except StopIteration as stop:
                    outcomes[rank] = stop.value
                except Exception as error:
                    outcomes[rank] = error
            running = set(calls)
            if not running:
                break
            if len(running) < self.size:
                for rank in running:
                    outcomes[rank] = PeerGone(f"rank {rank} waits in {calls[rank].name} for ranks that have ended")
                break
            if len({call.signature() for call in calls.values()}) > 1:
                raise AssertionError(f"ranks call different collectives: {sorted({str(call.signature()) for call in calls.values()})}")
            self.rounds += 1
            results = getattr(self, f"_{calls[0].kind}")([calls[rank] for rank in range(self.size)])
        return outcomes

    def _levels(self):
        return math.ceil(math.log2(self.size)) if self.size > 1 else 0

    def _allgather(self, calls):
        lengths = np.array([call.data.nbytes for call in calls])
        self.received_bytes += lengths.sum() - lengths
        self.messages += self._levels()
        return [np.concatenate([call.data for call in calls])] * self.size

    def _alltoall(self, calls):
        for sender, call in enumerate(calls):
            for receiver, part in enumerate(call.data):
                if part.size and sender != receiver:
                    self.received_bytes[receiver] += part.nbytes
                    self.messages[receiver] += 1
        return [[call.data[rank] for call in calls] for rank in range(self.size)]

    def _broadcast(self, calls):
        root = calls[0].root
        data = calls[root].data
        self.received_bytes += data.nbytes * (np.arange(self.size) != root)
        self.messages += self._levels()
        return [data] * self.size

    def _allreduce(self, calls):
        total = calls[0].data.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            for call in calls[1:]:
                total += call.data
        self.received_bytes += round(2 * (self.size - 1) / self.size * total.nbytes)
        self.messages += 2 * self._levels()
        return [total] * self.size
