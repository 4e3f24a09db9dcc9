"""The Transport over Horovod's PyTorch collectives."""

import warnings
from typing import Callable, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

from deepreduce_hvd.communicators.process_sets import ProcessSetTransport


def _tensor(array):
    """The array's memory as a tensor; collectives only read it. A tensor as it is."""
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class _Collective(NamedTuple):
    """A handle: Horovod's, and what makes its output the result."""

    started: int
    finish: Callable

    def query(self):
        return hvd.poll(self.started)

    def result(self):
        return self.finish(hvd.synchronize(self.started))


class HorovodTransport(ProcessSetTransport):
    """Asynchronous. A handle has query(), whether it is done, and result(), which waits; copies to the host have the same."""

    horovod = hvd

    def allgather(self, array, name):
        """Of a tensor on a device, (n,) uint8, too; the result is then one as well."""
        finish = torch.Tensor.numpy if isinstance(array, np.ndarray) else torch.Tensor.detach
        return _Collective(hvd.allgather_async(_tensor(array), name=name, process_set=self.process_set), finish)

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32)
        return _Collective(hvd.alltoall_async(_tensor(np.concatenate(parts)), splits, name=name, process_set=self.process_set), _split)

    def allreduce(self, array, name):
        return _Collective(hvd.allreduce_async(_tensor(array), name=name, op=hvd.Sum, process_set=self.process_set), torch.Tensor.numpy)

    def test(self, handle):
        return handle.query()

    def wait(self, handle):
        return handle.result()


def _split(received):
    output, splits = received
    return np.split(output.numpy(), np.cumsum(splits.numpy())[:-1])
