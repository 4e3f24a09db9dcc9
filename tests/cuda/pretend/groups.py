"""Test Horovod's groups= with gradients on a device, with two ranks.

All tensors that Horovod reduces in one call must be on one device. The reduction itself would need
a real device, so it runs on the host here.
"""

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer

import deepreduce_hvd as dr

hvd.init()
_started, _finished = horovod_optimizer.grouped_allreduce_async_, horovod_optimizer.synchronize
_given = {}  # handle -> tensors
calls = []


def grouped_allreduce_async_(tensors, **options):
    calls.append({tensor.device.type for tensor in tensors})
    if len(calls[-1]) > 1:
        raise RuntimeError("Tensors in list must be on same device.")
    handle = _started([tensor.cpu() for tensor in tensors], **options)
    _given[handle] = tensors
    return handle


def synchronize(handle):
    reduced, tensors = _finished(handle), _given.pop(handle)
    for tensor, other in zip(tensors, reduced):
        tensor.copy_(other)
    return tensors


def train(device, groups):
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, device=device))
        for name, shape in {"large": (300, 200), "bias": (70,), "other": (90, 30)}.items()
    }
    compressor = dr.Compressor(parameters=parameters.items(), dense_below=100)
    options = {"groups": [list(parameters.values())] if groups else None}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        parameters.items(),
        compression=compressor,
        **options,
    )
    for step in range(2):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(1000 * step + hvd.rank())
        sum(
            (parameter * torch.randn(parameter.shape, generator=random).to(device)).sum()
            for parameter in parameters.values()
        ).backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in parameters.items()}


expected = train("cpu", groups=False)
horovod_optimizer.grouped_allreduce_async_, horovod_optimizer.synchronize = (
    grouped_allreduce_async_,
    synchronize,
)
got = train("cuda:0", groups=True)
assert calls == [{"cuda"}] * 2, calls
assert all(torch.equal(got[name], expected[name]) for name in expected), (
    "expected the parameters of the host"
)
print("as expected")
