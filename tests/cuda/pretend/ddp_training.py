"""Train with DDP on a simulated device and on the host, on the ranks that torchrun has started.

On the device, gradients come later than the hook, and sums later than the end of a bucket's job.
DDP's own collectives go through the host, as PyTorch without CUDA has none for a device.
"""

import contextlib
import datetime

import torch
import torch.distributed as dist
from ddp_tools import batch
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.torch.ddp import adapter as ddp_adapter, device_group
from deepreduce_hvd.torch.ddp.adapter import DdpAdapter
from deepreduce_hvd.torch.ddp.buckets import BucketJob
from deepreduce_hvd.torch.ddp.device_buckets import DeviceBucketJob

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4))
STEPS = 4


class Network(torch.nn.Module):
    """A small network without convolutions, whose sums have another order on the device."""

    def __init__(self, dtype, channels_last):
        super().__init__()
        torch.manual_seed(0)
        self.image = torch.nn.Parameter(torch.randn(8, 3, 4, 4))
        self.first = torch.nn.Linear(48, 60)
        self.branch = torch.nn.Linear(60, 60)
        self.last = torch.nn.Linear(60, 3)
        self.to(dtype)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, images, branch):
        hidden = self.first((images * self.image).flatten(1)).tanh()
        return self.last(self.branch(hidden).tanh() if branch else hidden)


class ThroughHost(dist.ProcessGroup):
    """A process group that copies tensors to the host.

    Attributes:
        devices: the types of the devices of all tensors so far.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.devices = []

    def _run(self, collective, tensors, *arguments):
        self.devices += [tensor.device.type for tensor in tensors]
        host = [tensor.cpu() for tensor in tensors]
        work = collective(host, *arguments)
        work.wait()
        for tensor, copy in zip(tensors, host):
            tensor.copy_(copy)
        return work

    def broadcast(self, tensors, options):
        return self._run(self._gloo.broadcast, tensors, options)

    def allreduce(self, tensors, options):
        return self._run(self._gloo.allreduce, tensors, options)

    def allgather(self, outputs, inputs, options):
        host = [tensor.cpu() for tensor in inputs]
        return self._run(lambda out: self._gloo.allgather([out], host, options), outputs[0])

    def getBackendName(self):
        return "through_host"


class PretendedNccl:
    """NCCL's collectives on tensors of the device, through the host."""

    made = 0

    def __init__(self, store, rank, size, timeout):
        type(self).made += 1
        self._group, self._size = dist.ProcessGroupGloo(store, rank, size, timeout), size

    def allreduce(self, tensor):
        assert tensor.is_cuda
        host = tensor.cpu()
        work = self._group.allreduce(host)
        work.wait()
        tensor.copy_(host)
        return work

    def _allgather_base(self, rows, own):
        assert rows.is_cuda and own.is_cuda and rows.numel() == self._size * own.numel()
        host = torch.empty((self._size, own.numel()), dtype=own.dtype)
        work = self._group.allgather([list(host)], [own.cpu()])
        work.wait()
        rows.copy_(host.view(-1))
        return work

    def abort(self):
        self._group = None


@contextlib.contextmanager
def replaced(owner, **functions):
    """Replace attributes of ``owner``."""
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def pretended_nccl():
    with (
        replaced(ddp_adapter, has_nccl=lambda group: True),
        replaced(device_group, new_nccl_group=PretendedNccl),
    ):
        yield


dist.Backend.register_backend("through_host", ThroughHost, devices=["cpu", "cuda"])
dist.init_process_group("through_host", timeout=datetime.timedelta(seconds=60))
RANK = dist.get_rank()
# times of kernels, which DDP logs
torch._C._distributed_c10d.Logger.set_runtime_stats_and_log = lambda logger: None

ran: list[type] = []  # the class of each BucketJob
_run = BucketJob.run


def _noted_run(job):
    ran.append(type(job))
    _run(job)


BucketJob.run = _noted_run


def _late(buffer):
    """Let the contents of a tensor come later, when the current stream is waited for."""
    host = buffer.cpu()
    buffer.fill_(float("nan"))
    buffer.copy_(host, non_blocking=True)


_average, _hand_over = DdpAdapter.average, DeviceBucketJob._hand_over


def _average_late(adapter, bucket):
    """Hand over gradients that the stream of backward has not made yet."""
    if not bucket.buffer().is_cuda:
        return _average(adapter, bucket)
    with torch.cuda.stream(torch.cuda.Stream()):
        _late(bucket.buffer())
        return _average(adapter, bucket)


def _hand_over_late(job):
    """Hand over sums that the stream of the exchange has not made yet."""
    with torch.cuda.stream(job._streams.exchange):
        _late(job._buffer)
    _hand_over(job)


DdpAdapter.average, DeviceBucketJob._hand_over = _average_late, _hand_over_late


def model_of(
    device, codec=CODEC, ddp=None, dtype=torch.float32, channels_last=False, cap=0.01, **options
):
    """Return (network, DDP model, compressor)."""
    network = Network(dtype, channels_last).to(device)
    model = DistributedDataParallel(network, bucket_cap_mb=cap, **(ddp or {}))
    compressor = dr.Compressor(
        codec, parameters=network.named_parameters(), **{"dense_below": 200, **options}
    )
    compressor.register(model)
    return network, model, compressor


def loss_of(model, step, branch=True, factor=1.0):
    parameter = next(model.parameters())
    images = batch(step, RANK, parameter.dtype).to(parameter.device)
    return model(images, branch).pow(2).mean() * factor


def memories_of(compressor):
    """Return {name: list of the memories} on the host."""
    saved = compressor.state_dict()["parameters"]
    return {name: list(one["memory"].values()) for name, one in saved.items()}


def train(
    device,
    uses_branch=lambda step: True,
    factor=lambda step: 1.0,
    keeps=lambda step, name: False,
    **options,
):
    """Return {name: gradient, payload and memories} for each step, and the last statistics."""
    network, model, compressor = model_of(device, **options)
    seen = []
    for step in range(STEPS):
        for name, parameter in network.named_parameters():
            if not keeps(step, name):
                parameter.grad = None
        loss_of(model, step, uses_branch(step), factor(step)).backward()
        found = {
            name: [one.grad.cpu().clone()]
            for name, one in network.named_parameters()
            if one.grad is not None
        }
        for name, slot in compressor.adapter.slots.items():
            if slot.payload is not None:
                found.setdefault(name, []).append(slot.payload.cpu().clone())
        for name, memories in memories_of(compressor).items():
            found.setdefault(name, []).extend(memories)
        seen.append(found)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None and parameter.grad.isfinite().all():
                    parameter -= 0.1 * parameter.grad
    rows = compressor.stats()
    assert {row["steps"] for row in rows.values()} == {STEPS}
    return seen, rows


def expect_same(there, here, what):
    """Compare two results of :func:`train`, bit for bit; NaN is equal to NaN."""
    for step, (one, other) in enumerate(zip(there, here, strict=True)):
        assert one.keys() == other.keys(), (what, step)
        for name in other:
            for left, right in zip(one[name], other[name], strict=True):
                assert torch.equal(left.nan_to_num(), right.nan_to_num()), (what, step, name)


def compare(path, **options):
    """Train on the device and on the host, and compare.

    Args:
        path: the class of the jobs that must have run on the device.
        options: those of :func:`train`.

    Returns:
        The statistics of the device, and those of the host.
    """
    ran.clear()
    there, sent = train("cuda:0", **options)
    assert set(ran) == {path}, (options, ran)
    here, sent_by_host = train("cpu", **options)
    expect_same(there, here, options)
    return sent, sent_by_host
