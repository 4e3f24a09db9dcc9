"""The same training with Horovod and with PyTorch's DDP: ``ddp_like_horovod.py KIND FILE``; started
by test_torch_ddp.py under horovodrun and torchrun. Rank 0 writes the parameters and all payloads.
"""

import sys

import random_plans
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.schedule import Message

STEPS = 100
#: {case: settings of the compressor}
CASES = {
    "default": {},
    "quantized": {"codec": dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.QSGD(bits=4))},
    "plan": {
        "schedule": random_plans.plan_of(
            [
                Message(("4.weight",), "dense"),
                Message(("2.weight", "0.bias"), "codec", 0.3, "Allgather"),
                Message(("0.weight",), "codec", 0.01, "Allgather"),
            ],
            2,
        )
    },
}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(48, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40), torch.nn.Tanh(),
        torch.nn.Linear(40, 3),
    )  # fmt: skip


def train(layers, model, compressor, optimizer, rank):
    """Return the payloads of all steps, and the parameters."""
    payloads = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 48, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        payloads.append(
            {
                name: slot.payload
                for name, slot in compressor.adapter.slots.items()
                if not slot.dense
            }
        )
    return {"payloads": payloads, "parameters": layers.state_dict()}


def main(kind, path):
    if kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
    found = {case: run(kind, rank, **options) for case, options in CASES.items()}
    if rank == 0:
        torch.save(found, path)


def run(kind, rank, codec=None, **options):
    layers = model = network()
    compressor = dr.Compressor(
        codec, parameters=layers.named_parameters(), dense_below=50, **options
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    dr.prepare(optimizer, compressor)
    if kind == "horovod":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=layers.named_parameters(), compression=compressor
        )
    else:
        model = torch.nn.parallel.DistributedDataParallel(layers)
        compressor.register(model)
    return train(layers, model, compressor, optimizer, rank)


main(*sys.argv[1:])
