"""Ranks in one thread that advance their exchanges in a random order.

Collectives are matched by name, as Horovod does. A rank that would wait for others is an error.
"""

import numpy as np

from deepreduce_hvd.communicators.base import Transport


class Network:
    """The collectives that the ranks have started.

    Attributes:
        size: the number of ranks.
        given: {name of a collective: {rank: (its kind, what the rank gives)}}.
    """

    def __init__(self, size):
        self.size = size
        self.given = {}

    def start(self, rank, name, kind, data):
        calls = self.given.setdefault(name, {})
        assert rank not in calls, f"rank {rank} starts {name} twice"
        calls[rank] = kind, data
        kinds = {other for other, _ in calls.values()}
        assert len(kinds) == 1, f"ranks start different collectives as {name}: {kinds}"
        return name

    def is_done(self, name):
        return len(self.given[name]) == self.size

    def of_all(self, name):
        return [data for _, (_, data) in sorted(self.given[name].items())]


class NamedTransport(Transport):
    """The transport of one rank of a :class:`Network`. Its handles are the names."""

    def __init__(self, network, rank):
        self.network = network
        self.rank = rank
        self.size = network.size

    def allgather(self, array, name):
        return self.network.start(self.rank, name, ("allgather",), array)

    def alltoall(self, parts, name):
        return self.network.start(self.rank, name, ("alltoall",), parts)

    def broadcast(self, array, root, name):
        return self.network.start(self.rank, name, ("broadcast", root), array)

    def test(self, handle):
        return self.network.is_done(handle)

    def wait(self, handle):
        assert self.network.is_done(handle), f"rank {self.rank} would wait in {handle}"
        (kind, *root), _ = self.network.given[handle][self.rank]
        given = self.network.of_all(handle)
        if kind == "allgather":
            return np.concatenate(given)
        return given[root[0]] if root else [parts[self.rank] for parts in given]


def run(programs, random):
    """Start and advance the exchanges of all ranks until they are done.

    Args:
        programs: for each rank, a list of functions without arguments, called in this order. Each
            starts an exchange and returns it.
        random: a NumPy generator, which decides who is next.

    Returns:
        For each rank, the list of its exchanges.
    """
    started = [[] for _ in programs]
    while True:
        left = [rank for rank, calls in enumerate(programs) if len(started[rank]) < len(calls)]
        running = [one for exchanges in started for one in exchanges if not one.done]
        if not left and not running:
            return started
        if left and (not running or random.integers(3) == 0):
            rank = int(random.choice(left))
            started[rank].append(programs[rank][len(started[rank])]())
            continue
        ready = [one for one in random.permutation(running) if one.advance()]
        assert ready or left, "no rank can go on"
