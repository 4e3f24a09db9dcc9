"""The Transport over Horovod's PyTorch collectives.

Horovod remembers what it has gathered under a name and shape, and then runs it without asking. A rank that has called
``hvd.join()`` gives zeros to every allreduce, and agrees to all that is remembered, gathers too, which it cannot run: Horovod
ends there, on all ranks. What is not remembered it refuses to gather, and goes on. So messages of successive steps have other
shapes, (n,) and (n, 1), and the step in which a rank is missing ends with an error that names it.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops

from deepreduce_hvd._torch_references import Kept
from deepreduce_hvd.communicators.process_sets import ProcessSetTransport


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
    """Asynchronous. A handle has query(), whether it is done, and result(), which waits; copies to the host have the same."""

    horovod = hvd
    _in_a_column = False  # whether messages have the shape (n, 1)

    def at(self, step):
        return self._twin if step % 2 else self

    @functools.cached_property
    def _twin(self):
        twin = copy.copy(self)
        twin._in_a_column = True
        return twin

    # Horovod's own functions behind its public ones: they take the output, to which there must be another reference beforehand

    def allgather(self, array, name):
        """Of a tensor on a device, (n,) uint8, too; the result is then one as well."""
        finish = _flat_numpy if isinstance(array, np.ndarray) else torch.Tensor.flatten
        tensor = self._message(array)
        return self._start(mpi_ops._allgather_async, [tensor, tensor.new()], [name], finish)

    def alltoall(self, parts, name):
        splits = torch.tensor([part.size for part in parts], dtype=torch.int32)
        tensor = self._message(np.concatenate(parts))
        return self._start(mpi_ops._alltoall_async, [tensor, splits, tensor.new(), splits.new()], [name], _split)

    def allreduce(self, array, name):
        tensor = _tensor(array)
        return self._start(mpi_ops._allreduce_async, [tensor, torch.empty_like(tensor)], [name, hvd.Sum, 1.0, 1.0], torch.Tensor.numpy)

    def _message(self, array):
        tensor = _tensor(array)
        return tensor.view(-1, 1) if self._in_a_column else tensor

    def _start(self, function, tensors, arguments, finish):
        kept = Kept(*tensors)
        kept.hold()
        return _Collective(function(*tensors, *arguments, self.process_set), finish, kept)

    def test(self, handle):
        return handle.query()

    def wait(self, handle):
        return handle.result()


def _flat_numpy(output):
    return output.view(-1).numpy()


def _split(received):
    output, splits = received
    return np.split(_flat_numpy(output), np.cumsum(splits.numpy())[:-1])
