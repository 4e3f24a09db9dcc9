"""The common part of all transports over Horovod: ranks and process sets.

These are the same in every framework.
"""

from typing import Any

import numpy as np

from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.errors import InvalidArgumentError

_NOTHING = np.zeros(0, dtype=np.uint8)


class ProcessSetTransport(Transport):
    """A transport between the ranks of one Horovod process set; by default, between all ranks.

    ``horovod`` is the module of an adapter's framework, such as horovod.torch.
    """

    horovod: Any
    #: Horovod stores positions in gathered data, and lengths in an alltoall, in 31 bits.
    most_bytes = 2**31 - 1

    def __init__(self, process_set=None):
        self.process_set = self.horovod.global_process_set if process_set is None else process_set
        if not hasattr(self.process_set, "process_set_id"):
            raise InvalidArgumentError(
                "process set: expected a horovod ProcessSet, as hvd.add_process_set(ranks) returns,"
                f" got {process_set!r}"
            )
        if self.process_set.process_set_id is None:
            raise InvalidArgumentError(
                "process set: expected one that Horovod has registered, as"
                " hvd.add_process_set(ranks) or hvd.init(process_sets=...) does, got"
                f" {self.process_set}"
            )
        self._by_host = {}

    def sums_float16(self, on_host):
        """Horovod's Gloo omits numbers from some sums (docs/schedule.md). NCCL does not use it."""
        on_gloo = on_host or not self.horovod.nccl_built()
        return not (on_gloo and self.horovod.gloo_enabled())

    # A process that uses horovod.torch and horovod.tensorflow loads two copies of Horovod, but
    # process sets know only the copy imported last. So for the set of all ranks, ask the functions
    # of the framework's own copy.

    @property
    def _has_all_ranks(self):
        return self.process_set.process_set_id == 0

    @property
    def size(self):  # type: ignore[override]  # Horovod knows it, and it may change
        return self.horovod.size() if self._has_all_ranks else self.process_set.size()

    @property
    def rank(self):  # type: ignore[override]  # as size
        return self.horovod.rank() if self._has_all_ranks else self.process_set.rank()

    @property
    def includes_this_rank(self):  # type: ignore[override]  # as size
        return self._has_all_ranks or self.horovod.rank() in self.process_set.ranks

    @property
    def local_size(self):  # type: ignore[override]  # as size
        return self.horovod.local_size()

    @property
    def ranks(self):
        """The global ranks of the process set."""
        if self._has_all_ranks:
            return list(range(self.horovod.size()))
        return list(self.process_set.ranks)

    def broadcast(self, array, root, name):
        # Horovod's broadcast needs the size on every rank, but here only the root knows it
        return self.allgather(_NOTHING if array is None else array, name)

    def by_host(self, ranks_per_host):
        size, rank = self.horovod.size(), self.horovod.rank()
        key = ranks_per_host, size, rank
        if key in self._by_host:
            return self._by_host[key]
        count = self.horovod.local_size() if ranks_per_host is None else ranks_per_host
        if self.size != size or size % count:
            raise InvalidArgumentError(
                f"Hierarchical: expected a compressor for all ranks and hosts with {count} ranks"
                f" each, got a compressor for {self.size} of {size} ranks"
            )
        groups = [list(range(first, first + count)) for first in range(0, size, count)]
        groups.append(list(range(0, size, count)))
        # every rank must create all process sets, in the same order
        sets = [self._process_set(group) for group in groups]
        across = type(self)(sets[-1]) if rank % count == 0 else None
        self._by_host[key] = type(self)(sets[rank // count]), across
        return self._by_host[key]

    def _process_set(self, ranks):
        """Return a process set with these ranks.

        If Horovod already has one, which the user may have registered, it is used. Otherwise a new
        one is added. Horovod is asked every time: a process set that this package remembered would
        be invalid after a shutdown, and Horovod allows only one set with the same ranks.
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
        """Forget all process sets, because Horovod was shut down."""
        self._by_host.clear()
