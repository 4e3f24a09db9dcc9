"""Ranks as threads of one process. Their Transport fails if a rank is gone."""

import contextlib
import threading

import numpy as np

from deepreduce_hvd.communicators.base import Transport


class Lost(RuntimeError):
    """The error that Horovod raises when another rank is gone."""


class Group:
    """The ranks that communicate until one of them is gone.

    ``interrupted`` are pairs (rank, name of a collective). This collective fails on this rank,
    although all ranks take part.
    """

    def __init__(self, size, interrupted=()):
        self.size = size
        self.interrupted = set(interrupted)
        self.given = {}
        self.barrier = threading.Barrier(size)

    def exchange(self, rank, name, data):
        try:
            self.barrier.wait(timeout=20)
            self.given[rank] = name, data
            self.barrier.wait(timeout=20)
        except threading.BrokenBarrierError:
            raise Lost(f"rank {rank} waited in {name}") from None
        given = dict(self.given)
        # a rank that already has its result may be gone
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(timeout=20)
        assert {other for other, _ in given.values()} == {name}, given
        if (rank, name) in self.interrupted:
            self.barrier.abort()
            raise Lost(f"rank {rank} was cut off in {name}")
        return [data for _, (_, data) in sorted(given.items())]


class ThreadedTransport(Transport):
    """The transport of one rank of a group.

    Args:
        group: the :class:`Group`.
        rank: the number of the rank in the group.
        ranks: the global numbers of its ranks; by default, they are the numbers in the group.
        local_size: the number of ranks on the host of this one.
    """

    def __init__(self, group, rank, ranks=None, local_size=1):
        self.group = group
        self.rank = rank
        self.local_size = local_size
        self._ranks = ranks

    @property
    def ranks(self):
        return super().ranks if self._ranks is None else list(self._ranks)

    @property
    def size(self):
        return self.group.size

    def allgather(self, array, name):
        return np.concatenate(self.group.exchange(self.rank, name, array))

    def alltoall(self, parts, name):
        return [given[self.rank] for given in self.group.exchange(self.rank, name, parts)]

    def broadcast(self, array, root, name):
        return self.group.exchange(self.rank, name, array)[root]

    def test(self, handle):
        return True

    def wait(self, handle):
        return handle


def on_all(group, functions):
    """Call one function per rank concurrently; return the result or the exception of each."""
    outcomes = [None] * group.size

    def run(rank):
        try:
            outcomes[rank] = functions[rank]()
        except Exception as error:
            outcomes[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
