"""Test that DDP gives the same results on a device and on the host, on two ranks under torchrun.

DDP's own collectives go through the host, as PyTorch without CUDA has none for a device.
"""

import datetime

import torch
import torch.distributed as dist
from ddp_tools import batch, refused
from random_plans import plan_of
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.errors import PeerFailedError
from deepreduce_hvd.schedule import Message

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
    """A process group that copies tensors to the host."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _run(self, collective, tensors, *arguments):
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


dist.Backend.register_backend("through_host", ThroughHost, devices=["cpu", "cuda"])
dist.init_process_group("through_host", timeout=datetime.timedelta(seconds=60))
RANK = dist.get_rank()
# times of kernels, which DDP logs
torch._C._distributed_c10d.Logger.set_runtime_stats_and_log = lambda logger: None


def model_of(device, codec=CODEC, ddp=None, dtype=torch.float32, channels_last=False, **options):
    network = Network(dtype, channels_last).to(device)
    model = DistributedDataParallel(network, bucket_cap_mb=0.01, **(ddp or {}))
    compressor = dr.Compressor(
        codec, parameters=network.named_parameters(), **{"dense_below": 200, **options}
    )
    compressor.register(model)
    return network, model, compressor


def loss_of(model, step, branch=True, factor=1.0):
    parameter = next(model.parameters())
    images = batch(step, RANK, parameter.dtype).to(parameter.device)
    return model(images, branch).pow(2).mean() * factor


def train(device, uses_branch=lambda step: True, factor=lambda step: 1.0, **options):
    """Return {name: gradient and memories} for each step."""
    network, model, compressor = model_of(device, **options)
    seen = []
    for step in range(STEPS):
        network.zero_grad()
        loss_of(model, step, uses_branch(step), factor(step)).backward()
        found = {
            name: [one.grad.cpu().clone()]
            for name, one in network.named_parameters()
            if one.grad is not None
        }
        for name, saved in compressor.state_dict()["parameters"].items():
            found.setdefault(name, []).extend(saved["memory"].values())
        seen.append(found)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None and parameter.grad.isfinite().all():
                    parameter -= 0.1 * parameter.grad
    rows = compressor.stats()
    assert {row["steps"] for row in rows.values()} == {STEPS}
    return seen


def scenario_settings():
    plan = plan_of(
        [
            Message(("first.weight",), "dense"),
            Message(("branch.weight",), "fp16"),
            Message(("image",), "codec", 0.3, "SplitAllgather"),
        ],
        2,
    )
    for options in (
        {},
        {"codec": "dense"},
        {"ddp": {"gradient_as_bucket_view": True}},
        {"channels_last": True},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"communicator": dr.GTopK()},
        {"communicator": dr.SplitAllgather()},
        {"communicator": dr.Hierarchical(dr.Allgather(), 2)},
        {"schedule": plan},
        {
            "ddp": {"find_unused_parameters": True},
            "uses_branch": lambda step: (step + RANK) % 3 == 0,
        },
        {
            "loss_scale": lambda: 8.0,
            "factor": lambda step: float("inf") if (step, RANK) == (2, 1) else 8.0,
        },
    ):
        for step, (there, here) in enumerate(
            zip(train("cuda:0", **options), train("cpu", **options))
        ):
            assert there.keys() == here.keys()
            for name in here:
                for one, other in zip(there[name], here[name], strict=True):
                    assert torch.equal(one.nan_to_num(), other.nan_to_num()), (options, step, name)


def scenario_join():
    found = []
    for device in ("cuda:0", "cpu"):
        network, model, compressor = model_of(device)
        with model.join():
            for step in range(2 + 2 * RANK):
                network.zero_grad()
                loss_of(model, step).backward()
        found.append(compressor.state_dict()["parameters"])
    for name, saved in found[0].items():
        for kind, memory in saved["memory"].items():
            assert torch.equal(memory, found[1][name]["memory"][kind]), name


def scenario_errors():
    model = model_of("cuda:0", loss_scale=lambda: 8.0 if RANK else "none")[1]
    try:
        loss_of(model, 0).backward()
    except (PeerFailedError, ValueError) as error:
        assert "none" in str(error), error
    else:
        raise AssertionError("expected an error")
    model = model_of("cuda:0")[1]
    loss_of(model, 0).backward()
    torch.cuda.is_current_stream_capturing = lambda: True
    refused("that a CUDA graph captures", lambda: loss_of(model, 1).backward())
    torch.cuda.is_current_stream_capturing = lambda: False


for scenario in (scenario_settings, scenario_join, scenario_errors):
    scenario()
print("as expected")
dist.destroy_process_group()
