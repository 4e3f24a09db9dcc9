"""Collectives on a GPU between the ranks of a transport, with NCCL."""

import time
from typing import Any

import torch
import torch.distributed as dist

#: maximum time in seconds that the end of a group waits for its last collective: a rank may be gone
_END_SECONDS = 2.0
_PAUSE_SECONDS = 1e-3


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether a process group uses NCCL for tensors on GPUs."""
    if not dist.is_nccl_available() or torch.device("cuda") not in group._device_types:
        return False
    backend = group._get_backend(torch.device("cuda"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupNCCL)


def new_nccl_group(store, rank, size, timeout) -> Any:
    """Create a process group of NCCL, which is not one of torch.distributed's own."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


class DeviceGroup:
    """Collectives of tensors on one GPU; all ranks create the group together.

    They are ordered on the current stream. No method but :meth:`end` waits for the GPU.

    Args:
        store, rank, size, timeout: as for torch.distributed's process groups.
        device: the GPU.
    """

    def __init__(self, store, rank, size, timeout, device):
        self._group = new_nccl_group(store, rank, size, timeout)
        self._size = size
        self._last = torch.cuda.Event()  # the end of the last collective
        # NCCL connects the ranks in the first collective
        self.allreduce(torch.zeros(1, device=device))

    def allreduce(self, tensor):
        """Sum a tensor over all ranks, in place."""
        self._group.allreduce(tensor).wait()
        self._last.record(torch.cuda.current_stream(tensor.device))

    def allgather(self, own, sizes):
        """Gather tensors.

        Args:
            own: (n,) uint8.
            sizes: (P,) NumPy, the number of bytes of each rank.

        Returns:
            (m,) uint8, the tensors one after another in rank order.
        """
        largest = int(sizes.max())
        if own.numel() < largest:
            own = torch.nn.functional.pad(own, (0, largest - own.numel()))
        rows = torch.empty(self._size * largest, dtype=torch.uint8, device=own.device)
        if largest:
            self._group._allgather_base(rows, own).wait()
            self._last.record(torch.cuda.current_stream(own.device))
        if (sizes == largest).all():
            return rows
        parts = rows.view(self._size, largest)
        return torch.cat([row[:size] for row, size in zip(parts, sizes.tolist())])

    def end(self):
        """Free the communicator, when its last collective is done or cannot end.

        It must be gone before CUDA, at the end of the process. No rank waits for another one.
        """
        deadline = time.monotonic() + _END_SECONDS
        try:
            while not self._last.query() and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
        finally:
            self._group.abort()
