"""The Transport over Horovod's PyTorch collectives."""

import warnings

import horovod.torch as hvd
import numpy as np
import torch

from deepreduce_hvd.communicators import Transport
from deepreduce_hvd.errors import InvalidArgument

_NOTHING = np.zeros(0, dtype=np.uint8)


def _tensor(array):
    """The array's memory as a tensor; collectives only read it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class HorovodTransport(Transport):
    """Exchanges between the ranks of one Horovod process set. A handle is (Horovod's handle, what makes its output the result)."""

    def __init__(self, process_set=None):
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self._by_host = {}

    @property
    def size(self):
        return self.process_set.size()

    @property
    def rank(self):
        return self.process_set.rank()

    @property
    def ranks(self):
        """The global ranks of the process set."""
        own = self.process_set.ranks
        return list(range(hvd.size())) if own is None else list(own)

    def allgather(self, array, name):
        return hvd.allgather_async(_tensor(array), name=name, process_set=self.process_set), torch.Tensor.numpy

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32)
        return hvd.alltoall_async(_tensor(np.concatenate(parts)), splits, name=name, process_set=self.process_set), _split

    def broadcast(self, array, root, name):
        # Horovod's broadcast needs the size on every rank: here only the root knows it
        return self.allgather(_NOTHING if array is None else array, name)

    def allreduce(self, array, name):
        return hvd.allreduce_async(_tensor(array), name=name, op=hvd.Sum, process_set=self.process_set), torch.Tensor.numpy

    def by_host(self, ranks_per_host):
        size, rank = hvd.size(), hvd.rank()
        key = ranks_per_host, size, rank
        if key in self._by_host:
            return self._by_host[key]
        count = hvd.local_size() if ranks_per_host is None else ranks_per_host
        if self.size != size or size % count:
            raise InvalidArgument(
                f"Hierarchical: expected a compressor of all ranks and hosts of {count} ranks each, got {self.size} of {size} ranks"
            )
        groups = [list(range(first, first + count)) for first in range(0, size, count)]
        groups.append(list(range(0, size, count)))
        sets = [_process_set(group) for group in groups]  # every rank makes all of them, in the same order
        across = HorovodTransport(sets[-1]) if rank % count == 0 else None
        self._by_host[key] = HorovodTransport(sets[rank // count]), across
        return self._by_host[key]

    def test(self, handle):
        return hvd.poll(handle[0])

    def wait(self, handle):
        started, finish = handle
        return finish(hvd.synchronize(started))


#: ranks -> their process set: Horovod lets every set of ranks be added once
_process_sets = {}


def _process_set(ranks):
    if ranks == list(range(hvd.size())):
        return hvd.global_process_set
    known = _process_sets.get(tuple(ranks))
    if known is None or known.process_set_id is None:  # Horovod was shut down since
        known = _process_sets[tuple(ranks)] = hvd.add_process_set(ranks)
    return known


def _split(received):
    output, splits = received
    return np.split(output.numpy(), np.cumsum(splits.numpy())[:-1])
