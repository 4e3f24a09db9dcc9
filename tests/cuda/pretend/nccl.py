"""Run scripts/gpu_ranks.py as with a Horovod built with NCCL.

Payloads go from the device to the collective, which here copies them through the host.
"""

import pathlib
import runpy

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.torch import adapter as torch_adapter, transport as torch_transport

hvd.nccl_built = lambda: True
on_device = []
_horovod, _functions = torch_transport.hvd, torch_transport.mpi_ops


class _Functions:
    """Horovod's functions that start collectives. The allgather copies its input to the host."""

    def __getattr__(self, name):
        return getattr(_functions, name)

    def _allgather_async(self, tensor, output, *arguments):
        on_device.append(tensor.is_cuda)
        return _functions._allgather_async(tensor.cpu(), output.cpu(), *arguments), tensor.device


class _Horovod:
    def __getattr__(self, name):
        return getattr(_horovod, name)

    def synchronize(self, handle):
        started, device = handle if isinstance(handle, tuple) else (handle, None)
        result = _horovod.synchronize(started)
        return result if device is None else result.to(device)

    def poll(self, handle):
        return _horovod.poll(handle[0] if isinstance(handle, tuple) else handle)


torch_transport.hvd, torch_transport.mpi_ops = _Horovod(), _Functions()
assert torch_adapter.hvd.nccl_built()
ranks = runpy.run_path(
    str(pathlib.Path(__file__).resolve().parents[3] / "scripts" / "gpu_ranks.py")
)
ranks["main"]()
assert True in on_device and False in on_device, (
    "expected payloads on the device and headers on the host"
)

# one rank believes that Horovod carries less
if hvd.rank() == 1:
    torch_transport.HorovodTransport.most_bytes = 5000
try:
    ranks["train"](torch.device("cuda:0"), ranks["CODECS"]["Rice, raw"])
except dr.PeerFailedError as error:
    assert "rank 1: expected at most 2500 bytes, " in str(error), error
else:
    raise SystemExit("expected PeerFailedError, got none")
print("payloads went from the device to the collective")
