"""Compare random programs with fully_shard to simulated hosts.

Each program depends on its seed alone.
"""

import random

import torch
import torch.distributed as dist
from ddp_random import planned, stages
from ddp_tools import Network
from fsdp_tools import (
    LAYERS,
    TOGETHER,
    WHOLE,
    Reference,
    ShardOracle,
    expect_on_all_ranks,
    loss_of,
    meshes,
    sharded,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import deepreduce_hvd as dr

#: how several batches form one step
ONCE, NO_SYNC, NO_ALL_REDUCE, EACH = "once", "no sync", "no all-reduce", "each exchanged"


def run(seed):
    """Run the program of a seed; all ranks call this."""
    draw = random.Random(seed)
    size = dist.get_world_size()
    hosts = draw.choice([size, size, max(size // 2, 1), max(size // 2, 1), 1])
    codec, memory, communicator = stages(draw, hosts)
    if isinstance(communicator, dr.Hierarchical):
        communicator = dr.Hierarchical(dr.Allgather(), draw.choice([1, hosts]))
    if draw.random() < 0.4:
        plain = dr.Codec(codec.sparsifier)
        ways = {f"{layer}*": draw.choice(["dense", "fp16", plain]) for layer in ("first", "branch")}
        codec = {**ways, "*": codec}
    policy, dtype = draw.choice([
        (MixedPrecisionPolicy(), torch.float32), (MixedPrecisionPolicy(), torch.float32),
        (MixedPrecisionPolicy(), torch.float64), (MixedPrecisionPolicy(), torch.bfloat16),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), torch.float32),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), torch.float32),
        (MixedPrecisionPolicy(reduce_dtype=torch.float16), torch.float32),
    ])  # fmt: skip
    reduced = policy.reduce_dtype or policy.param_dtype or dtype
    how = draw.choice([ONCE, ONCE, NO_SYNC, NO_ALL_REDUCE, EACH])
    unused = how == ONCE and draw.random() < 0.4
    frozen = draw.random() < 0.3
    calls = draw.choice([WHOLE, LAYERS, LAYERS, TOGETHER])
    options = {"dense_below": draw.choice([0, 100, 500]), "seed": draw.randrange(1 << 40)}
    network = Network(dtype)
    network.convolution.bias.requires_grad_(not frozen)
    options["schedule"] = planned(draw, network, codec, memory, communicator, options, hosts)
    what = (
        f"seed {seed}: {hosts} hosts {codec} {memory} {communicator} {policy} {dtype} {how} {calls}"
        f" {options}"
    )

    reference = Reference(network, policy)
    mesh = meshes(hosts)
    try:
        compressor = sharded(
            network, mesh, codec, memory, calls, policy, communicator=communicator, **options
        )
        network.set_reduce_scatter_unused_params(unused)
        oracle = ShardOracle(compressor, network, mesh, reduced)
        for step in range(draw.randint(2, 4)):
            count = 1 if how == ONCE else draw.choice([1, 2, 3])
            uses = [not unused or draw.random() < 0.5 for _ in range(size)]
            _step(network, compressor, reference, oracle, mesh, step, count, how, uses, what)
            with torch.no_grad():
                for parameter in network.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def _step(network, compressor, reference, oracle, mesh, step, count, how, uses, what):
    size, rank = dist.get_world_size(), dist.get_rank()
    dtype = next(network.parameters()).dtype
    reference.follow(network)
    batches = [
        [reference.gradients(10 * step + number, one, uses[one]) for one in range(size)]
        for number in range(count)
    ]
    if not all(uses):
        for one in batches[0]:
            for name, gradient in one.items():
                if gradient is None and name.startswith("branch"):
                    one[name] = torch.zeros_like(
                        dict(network.named_parameters())[name].full_tensor()
                    )
    network.zero_grad()
    gradients = earlier = None
    for number in range(count):
        last = number == count - 1
        network.set_requires_gradient_sync(last or how != NO_SYNC)
        if how == NO_ALL_REDUCE:
            network.set_requires_all_reduce(last)
        loss_of(network, 10 * step + number, rank, uses[rank], dtype).backward()
        if how == NO_SYNC:
            own = [reference.accumulated([one[r] for one in batches]) for r in range(size)]
            gradients = reference.on_hosts(own, mesh)
        else:
            own = [reference.accumulated([one]) for one in batches[number]]
            found = reference.on_hosts(own, mesh)
            if how == NO_ALL_REDUCE and gradients is not None:
                for new, old in zip(found, gradients):
                    for name in new:
                        new[name] = new[name] + old[name]
            gradients = found
        if how == EACH or last:
            held = [
                {
                    name: None if not all(uses) and not shard.any() else shard
                    for name, shard in one.items()
                }
                for one in gradients
            ]

            def check(held=held, earlier=earlier, number=number):
                nonlocal result
                result = oracle.compare(
                    compressor, network, held, f"{what}, step {step}.{number}", earlier
                )

            result = None
            expect_on_all_ranks(check)
            earlier = result if how == EACH else None
