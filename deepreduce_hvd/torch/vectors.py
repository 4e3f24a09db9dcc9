"""PyTorch tensors as the indices and values of sparse vectors."""

import torch
from horovod.torch import mpi_ops

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.transport import HorovodTransport


def transport(process_set):
    """Return the transport over a process set."""
    return HorovodTransport(process_set)


def initialization():
    """Return an object that the next ``hvd.init()`` replaces."""
    return mpi_ops._handle_map


def to_numpy(name, tensor):
    """Return the tensor as a NumPy array; ``name`` is that of the argument."""
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"{name}: expected a dense tensor, got {tensor.layout}")
    return tensor.detach().cpu().numpy()


def from_numpy(array, like):
    """Return a new tensor on the device of ``like``."""
    return torch.from_numpy(array).to(like.device)
