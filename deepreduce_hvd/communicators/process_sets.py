"""What the transports over Horovod have in common: ranks and process sets, which are the same in
every framework.
"""

import numpy as np

from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.errors import InvalidArgumentError

_NOTHING = np.zeros(0, dtype=np.uint8)


class ProcessSetTransport(Transport):
    """Between the ranks of one process set of ``horovod``, an adapter's module such as
    horovod.torch; all ranks by default.
    """

    horovod = None

    def __init__(self, process_set=None):
        self.process_set = self.horovod.global_process_set if process_set is None else process_set
        self._by_host = {}

    @property
    def size(self):
        return self.process_set.size()

    @property
    def rank(self):
        return self.process_set.rank()

    @property
    def local_size(self):
        return self.horovod.local_size()

    @property
    def ranks(self):
        """The global ranks of the process set."""
        own = self.process_set.ranks
        return list(range(self.horovod.size())) if own is None else list(own)

    def broadcast(self, array, root, name):
        # Horovod's broadcast needs the size on every rank: here only the root knows it
        return self.allgather(_NOTHING if array is None else array, name)

    def by_host(self, ranks_per_host):
        size, rank = self.horovod.size(), self.horovod.rank()
        key = ranks_per_host, size, rank
        if key in self._by_host:
            return self._by_host[key]
        count = self.horovod.local_size() if ranks_per_host is None else ranks_per_host
        if self.size != size or size % count:
            raise InvalidArgumentError(
                f"Hierarchical: expected a compressor of all ranks and hosts of {count} ranks each, got {self.size} of {size} ranks"
            )
        groups = [list(range(first, first + count)) for first in range(0, size, count)]
        groups.append(list(range(0, size, count)))
        # every rank makes all of them, in the same order
        sets = [self._process_set(group) for group in groups]
        across = type(self)(sets[-1]) if rank % count == 0 else None
        self._by_host[key] = type(self)(sets[rank // count]), across
        return self._by_host[key]

    def _process_set(self, ranks):
        """The process set of these ranks: the one that Horovod has, which the user may have
        registered, or a new one.

        Horovod itself is asked: a set that this package remembered would be void after a shutdown,
        and Horovod has one of any ranks.
        """
        if ranks == list(range(self.horovod.size())):
            return self.horovod.global_process_set
        known = self.horovod.mpi_ops._basics._get_process_set_ids_and_ranks()
        for number, members in known.items():
            if list(members) == ranks:
                process_set = self.horovod.ProcessSet(ranks)
                process_set.process_set_id = number
                return process_set
        return self.horovod.add_process_set(ranks)

    def reset(self):
        """Horovod was shut down: its process sets are no more."""
        self._by_host.clear()
