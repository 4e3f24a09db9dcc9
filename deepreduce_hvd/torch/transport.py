"""The Transport over Horovod's PyTorch collectives."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops

from deepreduce_hvd.communicators.process_sets import ProcessSetTransport
from deepreduce_hvd.torch.references import Kept


def _tensor(array):
    """The array's memory as a tensor; collectives only read it. A tensor as it is."""
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class _Collective(NamedTuple):
    """A handle: Horovod's, what makes its output the result, and what the collective works on."""

    started: int
    finish: Callable
    kept: Kept

    def query(self):
        return hvd.poll(self.started)

    def result(self):
        output = hvd.synchronize(self.started)
        self.kept.release()
        return self.finish(output)


class HorovodTransport(ProcessSetTransport):
    """Asynchronous.

    A handle has query(), whether it is done, and result(), which waits; copies to the host have the
    same.
    """

    horovod = hvd

    # Horovod's own functions behind its public ones: they take the output, to which there must be
    # another reference beforehand

    def allgather(self, array, name):
        """Of a tensor on a device, (n,) uint8, too; the result is then one as well."""
        finish = torch.Tensor.numpy if isinstance(array, np.ndarray) else _as_it_is
        tensor = _tensor(array)
        return self._start(mpi_ops._allgather_async, [tensor, tensor.new()], [name], finish)

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32)
        tensor = _tensor(np.concatenate(parts))
        return self._start(
            mpi_ops._alltoall_async, [tensor, splits, tensor.new(), splits.new()], [name], _split
        )

    def allreduce(self, array, name):
        tensor = _tensor(array)
        return self._start(
            mpi_ops._allreduce_async,
            [tensor, torch.empty_like(tensor)],
            [name, hvd.Sum, 1.0, 1.0],
            torch.Tensor.numpy,
        )

    def _start(self, function, tensors, arguments, finish):
        kept = Kept(*tensors)
        kept.hold()
        return _Collective(function(*tensors, *arguments, self.process_set), finish, kept)

    def test(self, handle):
        return handle.query()

    def wait(self, handle):
        return handle.result()


def _as_it_is(output):
    return output


def _split(received):
    output, splits = received
    return np.split(output.numpy(), np.cumsum(splits.numpy())[:-1])
