"""Gradients of every kind on stock Horovod with PyTorch: layouts, frozen and unused parameters,
several optimizers, skipped steps.

Started by test_torch_gradients.py under horovodrun.
"""

import itertools
import resource
import sys
import time

import horovod.torch as hvd
import torch
from torch_tools import assert_equal_everywhere, distributed, run_all, sum_over_ranks

import deepreduce_hvd as dr

EVERYTHING = dr.Codec(dr.NoneSparsifier())


def communicators():
    """One of each kind: whole payloads, partial sums, values at places that all ranks know."""
    per_host = 2 if hvd.size() % 2 == 0 else hvd.size()
    return [
        dr.Allgather(), dr.SplitAllgather(), dr.RecursiveDoubling(), dr.GTopK(), dr.GTopK(form="tree"), dr.CLTK(), dr.SharedRandomK(),
        dr.Hierarchical(dr.Allgather(), per_host), dr.Hierarchical(dr.GTopK(), 1),
    ]  # fmt: skip


def codec_for(communicator, ratio=0.1):
    return dr.Codec(
        dr.RandomK(ratio) if communicator == dr.SharedRandomK() else dr.TopK(ratio),
        dr.Rice(),
        dr.QSGD(bits=4),
    )


def named(**shapes):
    """A model whose parameters have these shapes, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in shapes.items()
        }
    )


def coefficients(shape, step, rank=None, scale=1.0):
    rank = hvd.rank() if rank is None else rank
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(network, step, names=None):
    """A loss whose gradient of each parameter is :func:`coefficients`."""
    return sum(
        (network[name] * coefficients(network[name].shape, step).to(network[name].dtype)).sum()
        for name in names or list(network)
    )


def residual(compressor, name):
    return compressor.state_dict()["parameters"][name]["memory"]["residual"]


_found = []


def expect(condition, *what):
    """Notes what is wrong; a rank that raised here would leave the others waiting for it."""
    if not condition:
        _found.append(" ".join(map(str, what)))


def reporting(scenario):
    """The scenario, which raises at its end what :func:`expect` has found."""

    def run(directory):
        _found.clear()
        scenario(directory)
        assert not _found, "\n".join(_found)

    return run


# --- layouts ---


def scenario_a_sum_has_the_strides_of_its_gradient(directory):
    """Memory formats, views into one buffer, expanded gradients, every type; above and below
    dense_below; elements are where they belong.
    """
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        network = named(
            conv=(8, 4, 3, 3),
            small=(2, 4, 3, 3),
            transposed=(30, 40),
            buffered=(20, 10),
            expanded=(20, 10),
            gaps=(20, 10),
        )
        network = network.to(dtype)
        for name in ("conv", "small"):
            network[name].data = network[name].data.to(memory_format=torch.channels_last)
        network["transposed"].data = network["transposed"].data.t().contiguous().t()
        optimizer, _ = distributed(
            network, EVERYTHING, dr.NoMemory(), compressor_options={"dense_below": 100}
        )
        buffer = torch.zeros(1000, dtype=dtype)
        network["buffered"].grad = buffer[100:300].view(20, 10)
        network["gaps"].grad = buffer.view(50, 20)[20:40, 3:13]
        network["expanded"].grad = torch.full((10,), float(hvd.rank()), dtype=dtype).expand(20, 10)
        size = hvd.size()
        (loss_of(network, 0, [name for name in network if name != "expanded"])).backward()
        strides = {name: parameter.grad.stride() for name, parameter in network.items()}
        optimizer.synchronize()
        for name, parameter in network.items():
            mean = (
                sum(
                    coefficients(parameter.shape, 0, rank).to(dtype).double()
                    for rank in range(size)
                )
                / size
            )
            if name == "expanded":
                mean = torch.full((20, 10), sum(range(size)) / size, dtype=torch.float64)
                strides[name] = parameter.stride()
            expect(
                parameter.grad.stride() == strides[name] and parameter.grad.dtype == dtype,
                name,
                dtype,
                parameter.grad.stride(),
            )
            # sums are made in float32
            tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
            torch.testing.assert_close(
                parameter.grad.double(), mean, rtol=tolerance, atol=tolerance, msg=name
            )
        inside = network["buffered"].grad, network["gaps"].grad
        expect(
            inside[0].data_ptr() == buffer[100:].data_ptr()
            and inside[1].data_ptr() == buffer.view(50, 20)[20:, 3:].data_ptr(),
            dtype,
        )
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_fused_optimizers_update_the_right_elements(directory):
    """Of channels_last parameters, also where one rank has not used them; ranks whose gradients
    have other strides send the same elements.
    """

    def trained(make, compressed):
        network = named(conv=(8, 4, 3, 3), other=(8, 4, 3, 3), plain=(30, 40))
        for name in ("conv", "other"):
            network[name].data = network[name].data.to(memory_format=torch.channels_last)
        compression = (
            {
                "compression": dr.Compressor(
                    EVERYTHING, parameters=network.named_parameters(), dense_below=0
                )
            }
            if compressed
            else {}
        )
        optimizer = make(network.parameters())
        if compressed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=network.named_parameters(), **compression
            )
        for step in range(3):
            optimizer.zero_grad()
            if compressed:
                # by hand, and in other strides than the parameters'
                if hvd.rank() == 0 and step == 1:
                    for parameter in network.values():
                        parameter.grad = coefficients(parameter.shape, step)
                else:
                    unused = ["other"] if hvd.rank() == 1 else []
                    loss_of(
                        network, step, [name for name in network if name not in unused]
                    ).backward()
            else:
                for name, parameter in network.items():
                    parts = [
                        coefficients(parameter.shape, step, rank)
                        for rank in range(hvd.size())
                        if not (name == "other" and rank == 1)
                    ]
                    parameter.grad = torch.empty_like(parameter).copy_(sum(parts) / hvd.size())
            optimizer.step()
            if compressed:
                assert_equal_everywhere(network.named_parameters(), f"fused {step} {make.__name__}")
        return network

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.1, fused=True)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

    for make in (adam, sgd):
        for (name, got), (_, expected) in zip(
            trained(make, True).items(), trained(make, False).items()
        ):
            torch.testing.assert_close(
                got, expected, rtol=1e-4, atol=1e-5, msg=f"{make.__name__} {name}"
            )


# --- parameters that nothing is learnt of ---


def scenario_a_frozen_layer_stays(directory):
    """Frozen in mid-training it does not move, and its residual waits; trained again, the residual
    is sent.
    """
    for communicator, set_to_none in itertools.product(communicators(), (True, False)):
        network = named(first=(40, 30), second=(40, 30), last=(40, 30))
        optimizer, compressor = distributed(
            network,
            codec_for(communicator),
            compressor_options={"communicator": communicator, "bucket_bytes": 1 << 30},
        )

        def step(number, names):
            network.zero_grad(set_to_none=set_to_none)
            loss_of(network, number, names).backward()
            optimizer.step()
            assert_equal_everywhere(
                network.named_parameters(), f"frozen {communicator} {set_to_none} {number}"
            )

        for number in range(2):
            step(number, list(network))
        network["second"].requires_grad_(False)
        weights, kept = network["second"].detach().clone(), residual(compressor, "second").clone()
        expect(hvd.rank() > 0 or kept.any(), communicator, "kept nothing")
        for number in range(2, 4):
            step(number, ["first", "last"])
            expect(torch.equal(network["second"], weights), communicator, "moved the frozen layer")
            expect(
                torch.equal(residual(compressor, "second"), kept),
                communicator,
                "touched the frozen layer's residual",
            )
        network["second"].requires_grad_(True)
        step(4, list(network))
        expect(
            not kept.any() or not torch.equal(residual(compressor, "second"), kept),
            communicator,
            "kept the residual back",
        )


def scenario_what_a_rank_has_not_used_waits(directory):
    """Unused in a step on one rank, or on all: that rank sends nothing of it; what all ranks keep
    and get is what came in.
    """
    for communicator in communicators():
        network = named(always=(40, 30), sometimes=(40, 30))
        optimizer, compressor = distributed(
            network, codec_for(communicator), compressor_options={"communicator": communicator}
        )
        came_in, arrived = (
            torch.zeros(40, 30, dtype=torch.float64),
            torch.zeros(40, 30, dtype=torch.float64),
        )
        users = [range(hvd.size()), [0], [], [hvd.size() - 1], range(hvd.size())]
        for step, ranks in enumerate(users):
            used = hvd.rank() in ranks
            before = residual(compressor, "sometimes").clone()
            optimizer.zero_grad()
            loss_of(network, step, ["always", "sometimes"] if used else ["always"]).backward()
            optimizer.synchronize()
            got = network["sometimes"].grad.detach().clone()
            with optimizer.skip_synchronize():
                optimizer.step()
            came_in += coefficients((40, 30), step).double() if used else 0
            arrived += got.double()
            if isinstance(communicator, dr.Allgather) and not used:
                expect(
                    torch.equal(residual(compressor, "sometimes"), before),
                    step,
                    "what is not used was sent",
                )
            if not ranks:
                expect(
                    not got.any(), communicator, "a parameter that no rank has used gets a gradient"
                )
            assert_equal_everywhere([("gradient", got)], f"unused {communicator} {step}")
        total = arrived.view(-1) * hvd.size() + sum_over_ranks(
            residual(compressor, "sometimes"), f"unused.kept.{communicator}"
        )
        expected = sum_over_ranks(came_in.view(-1), f"unused.in.{communicator}")
        torch.testing.assert_close(
            total, expected, rtol=0, atol=2e-5 * float(expected.abs().max()), msg=str(communicator)
        )


def scenario_a_zero_gradient_that_backward_made_is_one(directory):
    """It is error feedback's turn: the residual is sent."""
    network = named(weight=(40, 30))
    optimizer, compressor = distributed(network, dr.Codec(dr.TopK(0.1)))
    for factor in (1.0, 0.0):
        optimizer.zero_grad()
        (loss_of(network, 0) * factor).backward()
        optimizer.synchronize()
        expect(network["weight"].grad.any(), factor)
        with optimizer.skip_synchronize():
            optimizer.step()


class CountingTransport:
    """Counts the gathers that are started, and waits for roll calls, so that no bucket has to."""

    def __init__(self, transport):
        self.transport, self.started = transport, 0

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def allgather(self, array, name):
        self.started += "handshake" not in name  # which comes once, before the first step
        return self.transport.allgather(array, name)

    def allreduce(self, array, name):
        handle = self.transport.allreduce(array, name)
        while not self.transport.test(handle):
            time.sleep(1e-3)
        return handle


def scenario_no_bucket_waits_for_what_is_frozen(directory):
    """Each bucket's message starts in backward: with layers frozen from the start, frozen later,
    and trained again.
    """
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(6)))
    network[3].weight.requires_grad_(False)
    optimizer, compressor = distributed(network, compressor_options={"bucket_bytes": 2 * 4 * 1600})
    transport = compressor.adapter.transport = CountingTransport(compressor.adapter.transport)
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(hvd.rank()))
    # before the first results are asked for the communicator is not ready
    for frozen, in_backward, in_all in (
        ({3}, 0, 3),
        ({3}, 3, 3),
        ({3, 0}, 2, 3),
        ({3, 0, 1}, 2, 4),
        ({3}, 3, 3),
    ):
        for number in {0, 1}:
            network[number].weight.requires_grad_(number not in frozen)
        optimizer.zero_grad()
        before = transport.started
        network(inputs).pow(2).mean().backward()
        expect(
            transport.started - before == in_backward,
            frozen,
            f"{transport.started - before} messages in backward",
        )
        optimizer.step()
        expect(
            transport.started - before == in_all, frozen, f"{transport.started - before} messages"
        )
        assert_equal_everywhere(network.named_parameters(), f"buckets {sorted(frozen)}")


# --- steps that are skipped ---


def expect_a_skipped_step(communicator, dtype, loud, peaks, shapes):
    """A step in which the parameter ``loud`` gets ``peaks[rank]`` in one place is skipped on all
    ranks, and those around it are not.
    """
    network = named(**shapes).to(dtype)
    codec = dr.Codec(dr.RandomK(1.0) if communicator == dr.SharedRandomK() else dr.TopK(0.1))
    optimizer, compressor = distributed(
        network,
        codec,
        compressor_options={"communicator": communicator, "loss_scale": lambda: 1.0},
        op=hvd.Sum,
    )
    peaks = [*peaks, *[0.0] * hvd.size()]
    for step, peak in enumerate((1.0, peaks[hvd.rank()], 1.0)):
        what = f"{communicator} {dtype} {loud} step {step}"
        kept = {
            name: residual(compressor, name).clone()
            for name in network
            if network[name].numel() >= 50
        }
        optimizer.zero_grad()
        spike = torch.zeros(network[loud].shape, dtype=dtype)
        spike.view(-1)[3] = peak
        (
            loss_of(network, step, [name for name in network if name != loud])
            + (network[loud] * spike).sum()
        ).backward()
        optimizer.synchronize()
        finite = all(bool(parameter.grad.isfinite().all()) for parameter in network.values())
        expect(finite == (step != 1), what, "is finite" if finite else "is not finite")
        if step == 1:
            for name, before in kept.items():
                expect(torch.equal(residual(compressor, name), before), what, "changed", name)
        with optimizer.skip_synchronize():
            if finite:
                optimizer.step()


def scenario_a_sum_that_overflows_is_a_skipped_step(directory):
    """Finite on every rank, too large for the gradient's type once summed: no residual loses
    anything.
    """
    for communicator in communicators():
        for dtype, peak in ((torch.float16, 6e4), (torch.float32, 3e38)):
            expect_a_skipped_step(
                communicator,
                dtype,
                "loud",
                [peak] * hvd.size(),
                {"quiet": (40, 30), "loud": (40, 30)},
            )
    # Horovod's own sum of what is not compressed: finite in float32, in which it is made, and not
    # in bfloat16
    peaks = [torch.finfo(torch.bfloat16).max, 2.0**119]
    expect_a_skipped_step(
        dr.Allgather(), torch.bfloat16, "small", peaks, {"quiet": (40, 30), "small": (8,)}
    )


# --- who hands gradients over ---


def scenario_optimizers_take_turns(directory):
    """Several optimizers on one compressor train as with one compressor each, in any order, with
    parameters that a rank has not used.
    """

    def trained(shared):
        networks = [named(a=(40, 30), b=(30, 30), unused=(30, 30)), named(c=(40, 30), d=(30, 30))]
        pairs = [
            [(f"{number}.{name}", parameter) for name, parameter in network.items()]
            for number, network in enumerate(networks)
        ]
        options = {"dense_below": 0, "bucket_bytes": 1 << 30}
        one = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pairs[0] + pairs[1], **options)
        optimizers = []
        for network, pair in zip(networks, pairs):
            compressor = (
                one if shared else dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pair, **options)
            )
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            optimizers.append(
                hvd.DistributedOptimizer(optimizer, named_parameters=pair, compression=compressor)
            )

        def backward(number, step):
            names = [
                name for name in networks[number] if name != "unused" or (step + hvd.rank()) % 2
            ]
            loss_of(networks[number], step, names).backward()

        def finish(number):
            optimizers[number].step()
            optimizers[number].zero_grad()

        for step, order in enumerate(("bBfF", "bBFf", "bfBF", "bfbBfF", "Bbfb FBf F")):
            for position, letter in enumerate(order.replace(" ", "")):
                number = int(letter.isupper())
                backward(number, 10 * step + position) if letter in "bB" else finish(number)
            for number, network in enumerate(networks):
                assert_equal_everywhere(network.named_parameters(), f"turns {step} {number}")
        return networks

    for one, other in zip(trained(True), trained(False)):
        for name in one:
            expect(torch.equal(one[name], other[name]), name, "differs")


def scenario_one_optimizer_skips_and_the_other_does_not(directory):
    network = named(a=(40, 30), b=(40, 30))
    pairs = list(network.named_parameters())
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.1)), parameters=pairs, dense_below=0, loss_scale=lambda: 1.0
    )
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.1),
            named_parameters=[(name, parameter)],
            compression=compressor,
        )
        for name, parameter in pairs
    ]
    for step in range(3):
        kept = {name: residual(compressor, name).clone() for name in network}
        loss = loss_of(network, step, ["a"]) * (
            float("inf") if step == 1 and hvd.rank() == 0 else 1.0
        )
        (loss + loss_of(network, step, ["b"])).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        for name in network:
            unchanged = torch.equal(residual(compressor, name), kept[name])
            expect(
                unchanged == (step == 1 and name == "a"),
                step,
                name,
                "unchanged" if unchanged else "changed",
            )
        for optimizer in optimizers:
            optimizer.zero_grad()


def scenario_allreduce_leaves_its_input(directory):
    """As Horovod without a compressor: hvd.allreduce and hvd.grouped_allreduce return new tensors."""
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
            mean = (
                sum(coefficients(parameter.shape, step, rank) for rank in range(hvd.size()))
                / hvd.size()
            )
            torch.testing.assert_close(reduced, mean, rtol=1e-5, atol=1e-6, msg=name)


def scenario_steps_of_hvd_allreduce_end_with_backward(directory):
    """One that leaves a parameter out: the next one's void step and loss scale are its own."""
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


def scenario_a_parameter_under_two_names_has_one_memory(directory):
    """As tied weights may have: with Horovod's optimizer and with hvd.allreduce."""
    network = named(tied=(40, 30))
    pairs = [("first", network["tied"]), ("last", network["tied"])]
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=pairs, dense_below=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=pairs,
        compression=compressor,
    )
    loss_of(network, 0).backward()
    optimizer.step()
    hvd.allreduce(network["tied"].grad, compression=compressor, name="two names")
    steps = {name: saved["steps"] for name, saved in compressor.state_dict()["parameters"].items()}
    expect(steps == {"first": 0, "last": 2}, steps)


def scenario_sparse_gradients_that_horovod_sums_itself(directory):
    """Without sparse_as_dense=True they pass by the compressor, uncompressed; what overflows there
    skips the step of all.
    """
    for poisoned in (False, True):
        network = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(100, 16, sparse=True), "dense": torch.nn.Linear(16, 16)}
        )
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(0.1)), compressor_options={"loss_scale": lambda: 1.0}
        )
        kept = residual(compressor, "dense.weight").clone()
        looked_up = network["table"](torch.tensor([3, 3, 7 + hvd.rank()])).sum()
        (
            network["dense"](torch.ones(16)).sum()
            + looked_up * (float("inf") if poisoned and hvd.rank() == 0 else 1.0)
        ).backward()
        optimizer.synchronize()
        gradient = network["table"].weight.grad.to_dense()
        row = compressor.stats()["table.weight"]
        expect(
            (row["path"], row["steps"]) == ("sparse", 1) and row["sent_bytes"] >= 2 * 16 * 4, row
        )
        if poisoned:
            expect(not gradient.isfinite().all(), "finite")
            expect(
                torch.equal(residual(compressor, "dense.weight"), kept),
                "the residual changed in the skipped step",
            )
        else:
            torch.testing.assert_close(gradient[3], torch.full((16,), 2.0))
            torch.testing.assert_close(
                gradient[7 : 7 + hvd.size()], torch.full((hvd.size(), 16), 1 / hvd.size())
            )
            expect(
                not torch.equal(residual(compressor, "dense.weight"), kept),
                "nothing was compressed",
            )
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_equal_embeddings_with_nan(directory):
    """NaN on one rank in one of two sparse gradients that are equal otherwise: a skipped step
    everywhere, in whatever way Horovod hands them over.
    """
    # of two planned only one comes: Horovod hands over what is there at synchronize()
    for passes in (1, 2):
        network = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(200, 8, sparse=True) for name in ("one", "two")}
        )
        optimizer, compressor = distributed(
            network, dr.Codec(dr.TopK(0.02)), compressor_options={"loss_scale": lambda: 1.0}, sparse_as_dense=True,
            backward_passes_per_step=passes,
        )  # fmt: skip
        for step in range(3):
            optimizer.zero_grad()
            kept = {name: residual(compressor, f"{name}.weight").clone() for name in network}
            factor = float("nan") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
            rows = torch.arange(step, step + 9)
            (network["one"](rows).sum() + factor * network["two"](rows).sum()).backward()
            optimizer.synchronize()
            finite = all(
                bool(embedding.weight.grad.coalesce().values().isfinite().all())
                for embedding in network.values()
            )
            expect(finite == (step != 1), passes, step, finite)
            for name in network:
                unchanged = torch.equal(residual(compressor, f"{name}.weight"), kept[name])
                expect(unchanged == (step == 1), passes, step, name, unchanged)
            with optimizer.skip_synchronize():
                if finite:
                    optimizer.step()


# --- costs ---


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def scenario_gradients_are_released_with_the_last_result(directory):
    elements = 20 << 20  # beyond what malloc keeps for itself
    for dtype in (torch.float32, torch.bfloat16):
        network = torch.nn.ParameterDict(
            {"weight": torch.nn.Parameter(torch.zeros(elements, dtype=dtype))}
        )
        optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.001)))
        used = []
        for _ in range(3):
            (network["weight"] * 1.0).sum().backward()
            optimizer.step()
            before = resident()
            network.zero_grad(set_to_none=True)
            used.append(before - resident())
        released = used[-1] / (elements * dtype.itemsize)
        expect(released > 0.9, dtype, f"released {used} of {elements * dtype.itemsize} bytes")


class NoLookingThrough(dict):
    """Slots by name that must not be searched one by one."""

    def values(self):
        raise AssertionError("looked through all parameters for one gradient")


def scenario_a_step_asks_once(directory):
    """For the loss scale; and finds the parameter of a gradient without looking through all."""
    asked = []
    network = torch.nn.ModuleDict(
        {f"layer{number}": torch.nn.Linear(30, 30) for number in range(20)}
    )
    network["table"] = torch.nn.Embedding(100, 30, sparse=True)
    network["twin"] = torch.nn.Embedding(100, 30, sparse=True)
    optimizer, compressor = distributed(
        network,
        compressor_options={"loss_scale": lambda: asked.append(1) or 2.0},
        sparse_as_dense=True,
    )
    for step in range(3):
        optimizer.zero_grad()
        rows = network["table"](torch.arange(4)) + network["twin"](torch.arange(4))
        slots = compressor.adapter.slots
        if step:  # ranks compare all parameters before the first one
            compressor.adapter.slots = NoLookingThrough(slots)
        sum(network[f"layer{number}"](rows).sum() for number in range(step, 20)).backward()
        optimizer.step()
        compressor.adapter.slots = slots
        expect(len(asked) == step + 1, step, f"asked {len(asked)} times")


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_all(
        {
            name: reporting(value)
            for name, value in globals().items()
            if name.startswith("scenario_")
        },
        sys.argv[1],
    )
