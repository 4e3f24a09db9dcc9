"""Test ``schedule="auto"`` with several optimizers, on stock Horovod with PyTorch.

Run by torch_schedule.py.
"""

import random

import horovod.torch as hvd
import torch
from scenario_runner import sample
from torch_given_plans import CODEC
from torch_gradients_tools import expect
from torch_tools import assert_equal_everywhere, backward, model

import deepreduce_hvd as dr


def scenario_auto_plans_for_all_optimizers_of_a_compressor(directory):
    """A step of the job has one step of each optimizer, even if one of them compresses nothing."""
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict(
        {"one": torch.nn.Linear(40, 30), "small": torch.nn.Linear(30, 1), "two": model()}
    )
    compressor = dr.Compressor(
        CODEC, parameters=parts.named_parameters(), schedule="auto", dense_below=50
    )
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=1e-3),
            named_parameters=[(f"{name}.{own}", p) for own, p in part.named_parameters()],
            compression=compressor,
        )
        for name, part in parts.items()
    }
    for step in range(60):
        parts["one"].zero_grad()
        parts["small"].zero_grad()
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(step + hvd.rank()))
        hidden = parts["one"](inputs)
        parts["small"](hidden.detach()).sum().backward()
        optimizers["small"].step()
        hidden.square().sum().backward()
        optimizers["one"].step()
        parts["two"].zero_grad()
        backward(parts["two"], step)
        optimizers["two"].step()
    expect(compressor.plan is not None, "there is no plan")
    planned = {name for message in compressor.plan.messages for name in message.members}
    compressed = {name for name, policy in compressor.policies.items() if not policy.dense}
    expect(planned == compressed, "planned", planned, "compressed", compressed)
    assert_equal_everywhere(parts.named_parameters(), "several optimizers")


def scenario_auto_with_parameters_that_some_ranks_do_not_use(directory):
    """Ranks that make other gradients in a step train the same, and none waits for another.

    The programs are random. Each of two or three optimizers has a part of the network. In some steps,
    a part is not trained. In others, a rank does not use it: Horovod passes its zeros when
    the optimizer steps. All ranks step the optimizers in the same order.
    """
    for seed in sample(hvd.size(), range(4)):
        draw, own = random.Random(seed), random.Random(seed * 10 + hvd.rank())
        torch.manual_seed(seed)
        network = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 20))
            for _ in range(draw.choice((2, 3)))
        )
        named = list(network.named_parameters())
        compressor = dr.Compressor(CODEC, parameters=named, schedule="auto", dense_below=50)
        one_without = draw.random() < 0.3  # the first optimizer does not have the compressor
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=1e-3),
                named_parameters=[(f"{n}.{name}", p) for name, p in part.named_parameters()],
                compression=hvd.Compression.none if one_without and n == 0 else compressor,
            )
            for n, part in enumerate(network)
        ]
        data = torch.Generator().manual_seed(seed * 10 + hvd.rank())
        changes = 0
        for _ in range(90):
            trained = [n for n in range(len(network)) if draw.random() < 0.8]
            order = draw.sample(trained, len(trained))
            hidden = torch.randn(4, 20, generator=data)
            used = [n for n in own.sample(trained, len(trained)) if own.random() < 0.8]
            losses = []
            for n in used:  # some parts feed the next ones
                result = network[n](hidden)
                losses.append(result.square().mean())
                hidden = result if own.random() < 0.5 else result.detach()
            for n in trained:
                optimizers[n].zero_grad()
            if losses:
                sum(losses).backward()
            before = compressor.plan
            for n in order:
                optimizers[n].step()
            changes += compressor.plan is not before
        expect(changes > 0, seed, "no plan was tried")
        assert_equal_everywhere(named, f"unused {seed}")
