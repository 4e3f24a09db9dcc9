"""Test hvd.allreduce without an optimizer, and a program's own collectives.

Runs on stock Horovod with PyTorch, from torch_several.py.
"""

import contextlib
import io
import random
import time
import warnings

import horovod.torch as hvd
import torch
from torch_gradients_tools import EVERYTHING, coefficients, expect, loss_of, named, residual
from torch_tools import assert_equal_everywhere, distributed

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import encoding_threads
from deepreduce_hvd.torch import exchanges


def expect_means(network, step, got):
    """Check the results ``got`` for the gradients of ``loss_of(network, step)``."""
    for (name, parameter), reduced in zip(network.items(), got):
        mean = (
            sum(coefficients(parameter.shape, step, rank) for rank in range(hvd.size()))
            / hvd.size()
        )
        torch.testing.assert_close(reduced, mean, rtol=1e-5, atol=1e-6, msg=name)


def scenario_allreduce_leaves_its_input(directory):
    """hvd.allreduce and hvd.grouped_allreduce return new tensors, as without a compressor."""
    network = named(large=(40, 30), last=(4, 30, 2, 2), small=(7,)).to(torch.float32)
    network["last"].data = network["last"].data.to(memory_format=torch.channels_last)
    compressor = dr.Compressor(EVERYTHING, parameters=network.named_parameters(), dense_below=50)
    for step in range(2):
        network.zero_grad()
        loss_of(network, step).backward()
        before = {name: parameter.grad.clone() for name, parameter in network.items()}
        if step:
            got = hvd.grouped_allreduce(
                [parameter.grad for parameter in network.values()],
                compression=compressor,
                name="grouped",
            )
        else:
            got = [
                hvd.allreduce(parameter.grad, compression=compressor, name=f"one.{name}")
                for name, parameter in network.items()
            ]
        for (name, parameter), reduced in zip(network.items(), got):
            expect(torch.equal(parameter.grad, before[name]), name, "was overwritten")
            expect(
                reduced.data_ptr() != parameter.grad.data_ptr()
                and reduced.stride() == parameter.grad.stride(),
                name,
                "shares memory",
            )
        expect_means(network, step, got)


# --- collectives without a name, which Horovod numbers in order ---


def pause_in_roll_calls(compressor):
    """Make a compressor sleep after some of its roll calls have begun.

    Each rank sleeps after different roll calls. So when the next lines run, a roll call has ended
    on some ranks and not on others.

    Returns:
        The function that sleeps or not.
    """
    draw, call = random.Random(hvd.rank()), compressor.adapter._call_ranks

    def pause():
        time.sleep(draw.choice((0.0, 0.0, 0.05)))

    def call_and_pause(label):
        started = call(label)
        pause()
        return started

    compressor.adapter._call_ranks = call_and_pause
    return pause


def scenario_names_do_not_depend_on_timing(directory):
    network = named(a=(40, 30), b=(7, 200), small=(5,))
    compressor = dr.Compressor(EVERYTHING, parameters=network.named_parameters(), dense_below=50)
    pause_in_roll_calls(compressor)
    for step in range(9):
        network.zero_grad()
        loss_of(network, step).backward()
        gradients = [parameter.grad for parameter in network.values()]
        if step % 3:
            got = [hvd.allreduce(gradient, compression=compressor) for gradient in gradients]
        else:
            got = hvd.grouped_allreduce(gradients, compression=compressor)
        expect_means(network, step, got)


def scenario_collectives_of_the_program_after_backward(directory):
    large = encoding_threads.FEWEST_ELEMENTS  # large enough for the encoding threads
    for dense_first, bucket_bytes in ((False, 1 << 26), (True, 1 << 26), (False, 0), (True, 6000)):
        # backward may end with a gradient that is not compressed
        network = named(
            first=(5,) if dense_first else (30, 40), middle=(7, 200), last=(40, 30), more=(large,)
        )
        options = {"bucket_bytes": bucket_bytes, "threads": 1}
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(0.1)), compressor_options=options
        )
        pause = pause_in_roll_calls(compressor)
        for step in range(9):
            optimizer.zero_grad()
            pause()
            loss_of(network, step).backward()
            total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
            optimizer.step()
            expect(int(total) == sum(range(hvd.size())), step, "the sum is", total)
        assert_equal_everywhere(network.named_parameters(), f"{dense_first} {bucket_bytes}")


def scenario_a_collective_of_the_program_on_a_rank_without_gradients(directory):
    """At the end of backward, the other ranks do not wait forever for a rank without gradients."""
    network = named(first=(30, 40), middle=(7, 200), last=(40, 30))
    optimizer, _ = distributed(
        network, dr.Codec(dr.TopK(0.1)), compressor_options={"bucket_bytes": 0}
    )
    usual, exchanges._MOST_SECONDS = exchanges._MOST_SECONDS, 0.3
    for step in range(4):
        optimizer.zero_grad()
        if step == 0 or hvd.rank() != step % hvd.size():
            loss_of(network, step).backward()
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"own.{step}")
        optimizer.step()
        expect(int(total) == hvd.size(), step, "the sum is", total)
    exchanges._MOST_SECONDS = usual
    assert_equal_everywhere(network.named_parameters(), "without gradients")


class Plus(torch.autograd.Function):
    """Sum over ranks in the backward pass, as differentiable collectives do it."""

    @staticmethod
    def forward(ctx, values, expected):
        ctx.expected = expected
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        summed = hvd.allreduce(torch.full((3,), float(hvd.rank())), op=hvd.Sum)
        expect(bool((summed == ctx.expected).all()), "a collective in backward gave", summed)
        return gradient, None


def scenario_collectives_without_a_name_anywhere(directory):
    """Random programs on late ranks: in forward, backward and after it, with unused parameters."""
    ranks = sum(range(hvd.size()))
    usual, exchanges._MOST_SECONDS = exchanges._MOST_SECONDS, 0.02
    for program in range(4):
        same, own = random.Random(program), random.Random(1000 * program + hvd.rank())
        shapes = {f"p{i}": (same.randint(8, 40), 40) for i in range(6)}
        network = named(**shapes)
        optimizer, compressor = distributed(
            network,
            dr.Codec(dr.TopK(0.1)),
            compressor_options={
                "bucket_bytes": same.choice((0, 6000)),
                "communicator": same.choice((dr.Allgather(), dr.GTopK(), dr.SplitAllgather())),
            },
        )
        pause_in_roll_calls(compressor)
        for step in range(6):
            optimizer.zero_grad()
            used = [name for name in network if same.random() < 0.8] or ["p0"]
            inside = [name for name in used if same.random() < 0.3]
            if same.random() < 0.5:
                everyone = hvd.allgather(torch.tensor([hvd.rank()]))
                expect(everyone.tolist() == list(range(hvd.size())), "gathered", everyone)
            time.sleep(own.choice((0, 0, 0.1)))
            losses = [
                (Plus.apply(network[name], ranks) if name in inside else network[name])
                .mul(coefficients(network[name].shape, step))
                .sum()
                for name in used
            ]
            sum(losses).backward()
            if same.random() < 0.7:
                total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
                expect(int(total) == ranks, step, "the sum is", total)
            time.sleep(own.choice((0, 0, 0.1)))
            optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"program {program}")
    exchanges._MOST_SECONDS = usual


def scenario_steps_of_hvd_allreduce_end_with_backward(directory):
    """A step of hvd.allreduce ends with the next backward pass, even if it left out a parameter.

    The next step has its own void flag and loss scale.
    """
    network = named(a=(40, 30), b=(40, 30))
    scale = [1.0]
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.1)),
        parameters=network.named_parameters(),
        dense_below=0,
        loss_scale=lambda: scale[0],
    )
    kept = {name: torch.zeros(1200) for name in network}
    for step, (names, scale[0], void) in enumerate(
        [("ab", 4.0, False), ("b", 4.0, True), ("ab", 2.0, False)]
    ):
        network.zero_grad()
        (
            loss_of(network, step, list(names))
            * (float("inf") if void and hvd.rank() == 0 else scale[0])
        ).backward()
        for name in names:
            gradient = network[name].grad
            came_in = gradient.view(-1) + kept[name] * (0.5 if step == 2 else 1.0)
            hvd.allreduce(gradient, compression=compressor, name=f"{name}.{step}", op=hvd.Sum)
            if not void:
                kept[name] = came_in - dr.decode(compressor.codec.encode(came_in))
    for name in network:
        expect(torch.equal(residual(compressor, name), kept[name]), name, "keeps something else")


# --- prepare ---


def scenario_sparse_gradients_that_horovod_sums_are_stepped_with_momentum(directory):
    """A prepared optimizer steps them as before, and those made dense without momentum."""

    def trained(kinds, prepare, settings, sparse_as_dense, compressed=True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(100, 30))
        named = [("table", weight)]
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(1.0)), parameters=named, communicator=dr.Allgather()
        )
        optimizer = torch.optim.SGD([weight], **settings)
        if prepare:
            with contextlib.redirect_stdout(io.StringIO()):
                dr.prepare(optimizer, compressor)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, sparse_as_dense=sparse_as_dense,
            compression=compressor if compressed else hvd.Compression.none,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(hvd.rank())
        for sparse in kinds:
            optimizer.zero_grad()
            rows = torch.randint(100, (9,), generator=generator)
            torch.nn.functional.embedding(rows, weight, sparse=sparse).square().sum().backward()
            optimizer.step()
        assert_equal_everywhere(named, "sparse")
        return weight.detach()

    with_momentum, without = {"lr": 0.01, "momentum": 0.9}, {"lr": 0.1}
    for kinds, as_dense, expected in (
        ([True] * 4, False, with_momentum),
        ([True] * 4, True, without),
        ([False] * 4, False, without),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trained(kinds, True, with_momentum, as_dense)
            plain = trained(kinds, False, expected, as_dense, compressed=False)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5, msg=f"{kinds} {as_dense}")


def scenario_an_optimizer_whose_gradients_do_not_reach_the_compressor(directory):
    """Its first step with gradients that are not sparse says what was forgotten."""
    for given in (hvd.Compression.none, None):
        network = named(large=(40, 30), small=(7,)).to(torch.float32)
        compressor = dr.Compressor(EVERYTHING, parameters=network.items())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        with contextlib.redirect_stdout(io.StringIO()):
            dr.prepare(optimizer, compressor)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=network.items(), compression=given or compressor
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # makes a step with zeros
            assert not caught, [str(one.message) for one in caught]
            for step in range(3):
                optimizer.zero_grad()
                if step:
                    loss_of(network, step).backward()
                optimizer.step()
        found = [str(one.message) for one in caught if "did not reach" in str(one.message)]
        expect(len(found) == (given is not None), given, found)
        expect(all(one.endswith("compression=compressor") for one in found), found)


def scenario_rank_0_loads_a_state_before_it_prepares_the_optimizer(directory):
    """hvd.broadcast_optimizer_state then gives all ranks the same state, and they train alike."""
    for kind, settings in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
        network = named(large=(40, 30), small=(7,)).to(torch.float32)
        compressor = dr.Compressor(parameters=network.items())
        optimizer = kind(network.parameters(), lr=0.01, **settings)
        if hvd.rank() == 0:
            other = named(large=(40, 30), small=(7,)).to(torch.float32)
            saved = kind(other.parameters(), lr=0.01, **settings)
            loss_of(other, 0).backward()
            saved.step()
            optimizer.load_state_dict(saved.state_dict())
        with contextlib.redirect_stdout(io.StringIO()):
            dr.prepare(optimizer, compressor)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        entries = {number: sorted(one) for number, one in optimizer.state_dict()["state"].items()}
        gathered = hvd.allgather_object(entries)
        expect(all(one == gathered[0] for one in gathered), gathered)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(network, step).backward()
            for name, parameter in network.items():
                parameter.grad = hvd.allreduce(parameter.grad, name=name, compression=compressor)
            optimizer.step()
        assert_equal_everywhere(network.items(), kind.__name__)
