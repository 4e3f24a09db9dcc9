"""Loss scaling with several passes per step, in DDP and fully_shard; run by *_scenarios.py.

Nothing may be lost: what the optimizer has applied, and the residuals, are the sum of all gradients
of the steps that the scaler did not skip.
"""

import contextlib
import random

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr

WIDTH = 24
CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.RawValue())


class Heads(torch.nn.Module):
    """Two linear functions; a batch uses one or both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs, heads):
        return [getattr(self, head)(inputs) for head in heads]


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def ddp_model(draw, scaler):
    network = Heads()
    model = DistributedDataParallel(
        network, find_unused_parameters=True, gradient_as_bucket_view=draw.random() < 0.5
    )
    compressor = dr.Compressor(
        CODEC, parameters=network.named_parameters(), dense_below=0, loss_scale=scaler.get_scale
    )
    compressor.register(model)

    def without_exchange(exchanges):
        return contextlib.nullcontext() if exchanges else model.no_sync()

    def residual(name, saved):
        total = saved.view(WIDTH, WIDTH).clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return model, network, compressor, without_exchange, residual


def fsdp_model(mesh):
    def build(draw, scaler):
        network = Heads()
        for module in (network.a, network.b, network):
            fully_shard(module, mesh=mesh["ranks"])
        compressor = dr.Compressor(
            CODEC, parameters=network.named_parameters(), dense_below=0, loss_scale=scaler.get_scale
        )
        compressor.register(network, mesh["hosts"])

        def without_exchange(exchanges):
            network.set_requires_gradient_sync(exchanges)
            return contextlib.nullcontext()

        def residual(name, saved):
            own = saved.reshape(-1, WIDTH)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own.contiguous())
            ranks = mesh["ranks"].size()
            rows = [torch.cat(parts[i : i + ranks]) for i in range(0, len(parts), ranks)]
            return sum(rows) / len(rows)

        return network, network, compressor, without_exchange, residual

    return build


def _batch(draw):
    """Return inputs and targets of this rank."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 40) + dist.get_rank())
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(2)]


def run(seed, build):
    """Train with random passes, overflows and calls of zero_grad; all ranks call this."""
    draw = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, network, compressor, without_exchange, residual = build(draw, scaler)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    before = {name: _whole(one) for name, one in network.named_parameters()}
    expected = {name: torch.zeros(WIDTH, WIDTH) for name in before}
    set_to_none, late = draw.random() < 0.7, draw.random() < 0.5
    skipped = 0
    for _ in range(10):
        gradients = {name: torch.zeros(WIDTH, WIDTH) for name in before}
        if not late:
            optimizer.zero_grad(set_to_none=set_to_none)
        count = draw.randint(1, 3)
        failing = draw.randrange(count) if draw.random() < 0.4 else None
        for number in range(count):
            exchanges = number == count - 1 or draw.random() < 0.6
            heads = draw.choice(["a", "b", "ab", "ab"])
            inputs, targets = _batch(draw)
            on_rank = draw.randrange(size)
            with without_exchange(exchanges):
                loss = sum((out * targets).sum() for out in model(inputs, heads))
                if late and number == 0:  # between forward and backward
                    optimizer.zero_grad(set_to_none=set_to_none)
                if number == failing and rank == on_rank:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            for head in heads:
                gradients[f"{head}.weight"] += targets.t() @ inputs
        parameters = {name: _whole(one) for name, one in network.named_parameters()}
        scaler.step(optimizer)
        if draw.random() < 0.3:
            compressor.state_dict()
        scaler.update()
        moved = any(
            not torch.equal(_whole(one), parameters[name])
            for name, one in network.named_parameters()
        )
        assert moved == (failing is None), f"seed {seed}"
        skipped += not moved
        for name, gradient in gradients.items():
            dist.all_reduce(gradient)
            if moved:
                expected[name] += gradient / size
    saved = compressor.state_dict()["parameters"]
    for name, one in network.named_parameters():
        left = residual(name, saved[name]["memory"]["residual"]) / saved[name]["loss_scale"]
        torch.testing.assert_close(
            before[name] - _whole(one) + left, expected[name], rtol=1e-4, atol=1e-3,
            msg=lambda text, name=name: f"seed {seed}, {name}: {text}",
        )  # fmt: skip
    return skipped


def scenario_skipped_steps_of_several_passes_lose_nothing(directory):
    assert sum(run(seed, ddp_model) for seed in range(15))
