"""Compare PyTorch's DDP on a GPU with the same training on the host, bit for bit, with torchrun.

    export PYTHONPATH=.
    torchrun --standalone --nproc-per-node 2 scripts/gpu_ddp.py gloo    two ranks share the GPU
    torchrun --standalone --nproc-per-node 1 scripts/gpu_ddp.py nccl    NCCL has one rank per GPU

Gradients and residuals must be equal. ``--device cpu`` tries the comparison on a machine without a
GPU.
"""

import argparse
import datetime
import sys

import torch
import torch.distributed as dist
from gpu_training import SHAPES, STEPS, expect_same, loss_of
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr

QUANTIZED = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.QSGD(bits=4))
TIMEOUT = datetime.timedelta(seconds=60)


def overflows(step, rank):
    return (step, rank) == (2, dist.get_world_size() - 1)


CASES = {
    "default": {},
    "Rice, QSGD": {"codec": QUANTIZED, "dense_below": 0},
    "uncompressed": {"codec": "dense"},
    "gradients as views of buckets": {"ddp": {"gradient_as_bucket_view": True}},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "GTopK": {"codec": QUANTIZED, "communicator": dr.GTopK()},
    "a gradient overflows": {
        "loss_scale": lambda: 8.0,
        "factor": lambda step: float("inf") if overflows(step, dist.get_rank()) else 8.0,
    },
}


class Network(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, step, factor):
        return loss_of(self.parameters(), step, dist.get_rank(), factor)


def train(device, dtype=torch.float32, ddp=None, factor=lambda step: 1.0, **options):
    """Return the averaged gradients and the memories of each step."""
    network = Network(dtype).to(device)
    model = DistributedDataParallel(network, bucket_cap_mb=0.1, **(ddp or {}))
    compressor = dr.Compressor(parameters=network.named_parameters(), **options)
    compressor.register(model)
    seen = []
    for step in range(STEPS):
        network.zero_grad()
        model(step, factor(step)).backward()
        # in the order of the stream, so that an average that arrives too late shows
        gradients = {
            name: parameter.grad.clone().nan_to_num()
            for name, parameter in network.named_parameters()
        }
        memories = {
            name: dict(kept["memory"])
            for name, kept in compressor.state_dict()["parameters"].items()
        }
        seen.append(
            {"gradient": {n: one.cpu() for n, one in gradients.items()}, "memory": memories}
        )
    return seen


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    dist.init_process_group(
        "gloo" if arguments.backend == "gloo" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT
    )
    for name, options in CASES.items():
        expect_same(train(arguments.device, **options), train("cpu", **options), f"{name}: step")
        if dist.get_rank() == 0:
            print(
                f"{name}: {STEPS} steps of DDP on {dist.get_world_size()} ranks with "
                f"{arguments.backend}, {arguments.device}, the same bits as on the host",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
