"""The Transport over Horovod's PyTorch collectives."""

import warnings

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


class HorovodTransport(ProcessSetTransport):
    """Asynchronous. A handle is (Horovod's handle, what makes its output the result)."""

    horovod = hvd

    def allgather(self, array, name):
        """Of a tensor on a device, (n,) uint8, too; the result is then one as well."""
        finish = torch.Tensor.numpy if isinstance(array, np.ndarray) else torch.Tensor.detach
        return hvd.allgather_async(_tensor(array), name=name, process_set=self.process_set), finish

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32)
        return hvd.alltoall_async(_tensor(np.concatenate(parts)), splits, name=name, process_set=self.process_set), _split

    def allreduce(self, array, name):
        return hvd.allreduce_async(_tensor(array), name=name, op=hvd.Sum, process_set=self.process_set), torch.Tensor.numpy

    def test(self, handle):
        return hvd.poll(handle[0])

    def wait(self, handle):
        started, finish = handle
        return finish(hvd.synchronize(started))


def _split(received):
    output, splits = received
    return np.split(output.numpy(), np.cumsum(splits.numpy())[:-1])
