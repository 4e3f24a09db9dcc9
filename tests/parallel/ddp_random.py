"""Random programs with PyTorch's DDP, each from its seed alone, held to the simulated ranks."""

import contextlib
import random

import torch
import torch.distributed as dist
from codecs_table import INDEX_WITH_MEMORY as INDEX, MEMORIES, VALUE_WITH_MEMORY as VALUE
from ddp_tools import (
    Network,
    Oracle,
    assert_equal_everywhere,
    distributed,
    gradients_of,
    loss_of,
    sums_densely,
)
from random_plans import random_plan, takes_any_plan

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import encoding_threads
from deepreduce_hvd.planning import layout

encoding_threads.FEWEST_ELEMENTS = 0  # the gradients of these programs are small


def stages(draw, size):
    """Return (codec, memory, communicator) that work together, often with any plan."""
    for_plans = draw.random() < 0.3
    while True:
        communicator = draw.choice([
            dr.Allgather(), dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(),
            dr.CLTK(), dr.SharedRandomK(), dr.Hierarchical(dr.Allgather(), draw.choice([1, size])),
        ])  # fmt: skip
        sparsifier = draw.choice([
            dr.TopK(0.1), dr.TopK(k=5), dr.TopK(0.02, warmup_steps=2), dr.RandomK(0.2),
            dr.Threshold(0.01), dr.ChunkTopK(0.1), dr.NoneSparsifier(),
        ])  # fmt: skip
        codec = dr.Codec(
            sparsifier,
            index=INDEX[draw.choice(sorted(INDEX))],
            value=VALUE[draw.choice(sorted(VALUE))],
        )
        memory = MEMORIES[draw.choice(["residual", "residual", *sorted(MEMORIES)])]
        if size > 2 and sums_densely(communicator):
            continue  # the order of additions is not the oracle's
        with contextlib.suppress(dr.InvalidArgumentError):
            compressor = dr.Compressor(
                codec,
                memory,
                communicator,
                [("one", torch.nn.Parameter(torch.zeros(9)))],
                dense_below=0,
            )
            if takes_any_plan(compressor) or not for_plans:
                return codec, memory, communicator


def planned(draw, network, codec, memory, communicator, options, hosts):
    """Return a random plan for most compressors that allow any, else None."""
    compressor = dr.Compressor(
        codec, memory, communicator, network.named_parameters(), dense_below=options["dense_below"]
    )
    if not takes_any_plan(compressor) or draw.random() < 0.2:
        return None
    codecs = {name: one.codec for name, one in compressor.policies.items() if not one.dense}
    least = max(map(layout.ratio_of, codecs.values()), default=0.0)
    return random_plan(draw, [*codecs], hosts, least=least)


def run(seed):
    """Run the program of a seed; all ranks call this."""
    draw = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    codec, memory, communicator = stages(draw, size)
    if draw.random() < 0.4:
        plain = dr.Codec(codec.sparsifier)
        ways = {f"{layer}*": draw.choice(["dense", "fp16", plain]) for layer in ("first", "branch")}
        codec = {**ways, "*": codec}
    dtype = draw.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16, torch.float64])
    unused = draw.random() < 0.4
    ddp = {
        "bucket_cap_mb": draw.choice([0.001, 0.01, 25]),
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": unused,
        "static_graph": not unused and draw.random() < 0.3,
    }
    options = {
        "dense_below": draw.choice([0, 100, 500]),
        "seed": draw.randrange(1 << 40),
        "threads": draw.choice([None, 0, 1, 3]),
    }
    network = Network(dtype, channels_last=draw.random() < 0.3)
    options["schedule"] = planned(draw, network, codec, memory, communicator, options, size)
    what = f"seed {seed}: {codec} {memory} {communicator} {dtype} {ddp} {options}"
    steps = draw.randint(2, 5)
    plan = [
        [
            [draw.random() < 0.5 if unused else True for _ in range(size)]
            for _ in range(1 if ddp["static_graph"] else draw.choice([1, 1, 2, 3]))
        ]
        for _ in range(steps)
    ]
    # parameters whose old gradient is not cleared before a step, on each rank
    names = [name for name, _ in network.named_parameters()]
    keeps = draw.random() < 0.6 and not memory.needs_new_gradients
    kept = [
        [{name for name in names if keeps and draw.random() < 0.4} for _ in range(size)]
        for _ in range(steps)
    ]

    try:
        model, compressor = distributed(
            network, codec, memory, ddp, communicator=communicator, **options
        )
        oracle = Oracle(compressor, network)
        old = [{} for _ in range(size)]  # gradients that each rank keeps
        for step, batches in enumerate(plan):

            def backward(other, number, one, step=step, batches=batches):
                loss_of(other, 10 * step + number, one, batches[number][one]).backward()

            def run_all(other, one, batches=batches, backward=backward):
                for number in range(len(batches)):
                    backward(other, number, one)

            old = [
                {name: gradient for name, gradient in old[one].items() if name in kept[step][one]}
                for one in range(size)
            ]
            made = [gradients_of(network, lambda other: run_all(other, one)) for one in range(size)]
            used = {name for own in made for name, gradient in own.items() if gradient is not None}
            expected = [
                _sent(
                    made[one],
                    gradients_of(network, lambda other: run_all(other, one), old[one]),
                    used,
                )
                for one in range(size)
            ]
            for name, parameter in network.named_parameters():
                if name not in old[rank]:
                    parameter.grad = None
            for number in range(len(batches)):
                last = number == len(batches) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    backward(model, number, rank)
            oracle.check(compressor, network, expected, what, old[rank])
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    if name in used:
                        parameter -= 0.1 * parameter.grad
                        for own in old:  # the same on all ranks
                            own[name] = parameter.grad.clone()
            assert_equal_everywhere(network.named_parameters(), what)
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def _sent(made, gradients, used):
    """Return what a rank sends: None where no rank uses a parameter or the rank has only zeros.

    Args:
        made: {name: gradient or None} of this pass alone.
        gradients: the same with the old gradients.
        used: names of the parameters that any rank uses.
    """
    return {
        name: gradient
        if name in used and (made[name] is not None or (gradient is not None and gradient.any()))
        else None
        for name, gradient in gradients.items()
    }
