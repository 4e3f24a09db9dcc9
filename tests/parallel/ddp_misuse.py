"""Warnings about programs whose gradients PyTorch's DDP does not exchange.

Run by ddp_scenarios.py.
"""

import random
import warnings

import torch
import torch.distributed as dist
from ddp_tools import Network, distributed, loss_of
from torch.nn.parallel import DistributedDataParallel


def _warned(optimizers, make_gradients):
    """Make gradients and step; return the warnings about those that were not exchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            optimizer.zero_grad()
        make_gradients()
        for optimizer in optimizers:
            optimizer.step()
    return [str(one.message) for one in caught if "not exchanged" in str(one.message)]


def _is_equal_everywhere(network):
    """Return whether all ranks have the same parameters."""
    flat = torch.cat([one.detach().flatten() for one in network.parameters()])
    all_of = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, flat)
    return all(torch.equal(one, flat) for one in all_of)


def scenario_a_program_is_warned_exactly_if_ranks_differ(directory):
    """Random programs: layers frozen at any time, no_sync() and passes around the DDP model."""
    seen = set()
    for seed in range(12):
        choose = random.Random(seed)
        network = Network()
        layers = [network.convolution, network.first, network.branch, network.last]
        for layer in layers[:-1]:  # the last one is always trained
            layer.requires_grad_(choose.random() < 0.7)
        finds = {"find_unused_parameters": True}
        model, _ = distributed(network, ddp=finds, dense_below=0)
        cut = choose.randrange(8)
        everything = list(network.parameters())
        optimizers = [
            torch.optim.SGD(part, lr=0.1) for part in (everything[:cut], everything[cut:]) if part
        ]
        has_differed = False
        for step in range(6):
            for layer in layers[:-1]:
                if choose.random() < 0.1:
                    layer.requires_grad_(choose.random() < 0.8)
            way = choose.choice(["plain"] * 8 + ["no_sync", "bypass", "accumulate"])

            def make_gradients(step=step, way=way, model=model, network=network):
                if way in ("no_sync", "accumulate"):
                    with model.no_sync():
                        loss_of(model, step, dist.get_rank()).backward()
                if way != "no_sync":
                    called = network if way == "bypass" else model
                    loss_of(called, step, dist.get_rank()).backward()

            texts = _warned(optimizers, make_gradients)
            differs = not _is_equal_everywhere(network)
            assert bool(texts) == (differs and not has_differed), (seed, step, way, texts, differs)
            has_differed = has_differed or differs
            seen.add((way, differs))
    assert {
        ("plain", True), ("plain", False), ("accumulate", False), ("no_sync", True),
        ("bypass", True),
    } <= seen  # fmt: skip


def scenario_a_parameter_that_ddp_ignores_is_not_named(directory):
    network = Network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        network, ["branch.weight", "branch.bias"]
    )
    model, _ = distributed(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        texts = _warned(
            [optimizer], lambda step=step: loss_of(model, step, dist.get_rank()).backward()
        )
        assert texts == [], texts
