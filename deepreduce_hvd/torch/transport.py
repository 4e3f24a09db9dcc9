"""The transport over Horovod's PyTorch collectives."""

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
    """Return the array's memory as a tensor, which collectives only read; a tensor unchanged."""
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class _Collective(NamedTuple):
    """The handle of a collective: ``query()`` tests it, ``result()`` waits for it.

    Attributes:
        started: Horovod's handle.
        finish: function that makes the result from Horovod's output.
        kept: tensors of the collective.
    """

    started: int
    finish: Callable
    kept: Kept

    def query(self):
        """Return whether the collective is complete."""
        return hvd.poll(self.started)

    def result(self):
        """Wait for the collective and return its result."""
        output = hvd.synchronize(self.started)
        self.kept.release()
        return self.finish(output)


class HorovodTransport(ProcessSetTransport):
    """Asynchronous transport.

    A handle has query(), which returns whether it is done, and result(), which waits. Copies to the
    host have the same interface.
    """

    horovod = hvd
    #: whether uncompressed gradients that are ready share one sum
    merges_sums = True

    # These call the private functions behind Horovod's public ones, which accept the output tensor:
    # another reference to it must exist before the collective starts.

    def allgather(self, array, name):
        """Gather NumPy arrays, or (n,) uint8 tensors on a device; the result is the same kind."""
        finish = torch.Tensor.numpy if isinstance(array, np.ndarray) else _as_it_is
        tensor = _tensor(array)
        return self._start(mpi_ops._allgather_async, [tensor, tensor.new()], [name], finish)

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32, device="cpu")
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

    def allreduce_in_place(self, array, name):
        """Start a sum in the memory of ``array``, as Horovod's optimizers sum gradients."""
        tensor = _tensor(array)
        return self._start(
            mpi_ops._allreduce_async,
            [tensor, tensor],
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
