"""Test gradients of every kind on stock Horovod with PyTorch.

The scenarios cover memory layouts, frozen and unused parameters, and skipped steps. Started by
test_torch_gradients.py under horovodrun.
"""

import itertools
import sys
import time

import horovod.torch as hvd
import torch
from scenario_runner import sample
from torch_gradients_tools import (
    EVERYTHING,
    codec_for,
    coefficients,
    communicators,
    expect,
    loss_of,
    named,
    residual,
    run_reporting,
)
from torch_tools import assert_equal_everywhere, distributed, sum_over_ranks

import deepreduce_hvd as dr

# --- layouts ---


def scenario_a_sum_has_the_strides_of_its_gradient(directory):
    """A reduced gradient has the strides of its input.

    This holds for memory formats, views into one buffer, and every dtype, above and below
    dense_below. An expanded gradient gets the strides of its parameter. Elements keep their
    positions.
    """
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in sample(hvd.size(), dtypes):
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
            # sums are computed in float32
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
    """Fused optimizers update the right elements of channels_last parameters.

    This also holds if one rank has not used a parameter. Ranks whose gradients have different
    strides send the same elements.
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
                # gradients that are set here have other strides than the parameters
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


# --- frozen and unused parameters ---


def scenario_a_frozen_layer_stays(directory):
    """A layer that is frozen during training does not change, and its residual is kept.

    The residual is sent when the layer is trained again.
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
    """A rank sends nothing for a parameter that it has not used in a step.

    In some steps only one rank uses the parameter, or none does. The results plus the residuals of
    all ranks equal the inputs.
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
    """If backward computes a zero gradient, the residual is still sent."""
    network = named(weight=(40, 30))
    optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.1)))
    for factor in (1.0, 0.0):
        optimizer.zero_grad()
        (loss_of(network, 0) * factor).backward()
        optimizer.synchronize()
        expect(network["weight"].grad.any(), factor)
        with optimizer.skip_synchronize():
            optimizer.step()


class CountingTransport:
    """A transport that counts gathers.

    It waits for every roll call, so that no bucket must wait for one.
    """

    def __init__(self, transport):
        self.transport, self.started = transport, 0

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def allgather(self, array, name):
        self.started += "handshake" not in name  # the handshake happens once, before the first step
        return self.transport.allgather(array, name)

    def allreduce(self, array, name):
        handle = self.transport.allreduce(array, name)
        while not self.transport.test(handle):
            time.sleep(1e-3)
        return handle


def scenario_no_bucket_waits_for_what_is_frozen(directory):
    """All buckets but the last start their messages during backward.

    This holds for layers that are frozen from the start, frozen later, or trained again.
    """
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(6)))
    network[3].weight.requires_grad_(False)
    optimizer, compressor = distributed(network, compressor_options={"bucket_bytes": 2 * 4 * 1600})
    transport = compressor.adapter.transport = CountingTransport(compressor.adapter.transport)
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(hvd.rank()))
    # the communicator is ready only after the first results are requested
    for frozen, in_backward, in_all in (
        ({3}, 0, 3),
        ({3}, 2, 3),
        ({3, 0}, 1, 3),
        ({3, 0, 1}, 1, 4),
        ({3}, 2, 3),
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
    """Check that all ranks skip a step, but not the steps before and after it.

    In the skipped step, one element of the gradient of ``loud`` is ``peaks[rank]``.
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
    """The gradients are finite on every rank, but their sum overflows their dtype.

    The step is skipped, and no residual loses anything.
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
    # Horovod sums uncompressed gradients itself. The sum is finite in float32, in which it is
    # computed, but not in bfloat16.
    peaks = [torch.finfo(torch.bfloat16).max, 2.0**119]
    expect_a_skipped_step(
        dr.Allgather(), torch.bfloat16, "small", peaks, {"quiet": (40, 30), "small": (8,)}
    )


if __name__ == "__main__":
    run_reporting(globals(), sys.argv[1])
