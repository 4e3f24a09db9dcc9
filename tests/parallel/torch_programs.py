"""Programs on stock Horovod with PyTorch that do not just step: other orders on each rank, gradients
that are discarded, steps that are compiled. Run by torch_several.py.
"""

import random
import warnings

import horovod.torch as hvd
import torch
from torch_gradients_tools import expect, loss_of, named
from torch_tools import assert_equal_everywhere, backward, batch, distributed, model

import deepreduce_hvd as dr


def scenario_ranks_request_the_results_of_optimizers_in_other_orders(directory):
    """Random orders on each rank, with few and with many buckets; no rank waits forever."""
    for bucket_bytes in (0, 4000, 1 << 30):
        networks = [named(a=(40, 30), b=(30, 30)), named(c=(40, 30)), named(d=(20, 30))]
        every = [pair for network in networks for pair in network.items()]
        compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.1)), parameters=every, dense_below=0, bucket_bytes=bucket_bytes
        )
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(network.parameters(), lr=0.1),
                named_parameters=network.items(), compression=compressor,
            )
            for network in networks
        ]  # fmt: skip
        draw = random.Random(hvd.rank())
        for step in range(6):
            sum(loss_of(network, step) for network in networks).backward()
            order = draw.sample(optimizers, len(optimizers)) if step else optimizers
            for optimizer in order:
                optimizer.synchronize()
            for optimizer in order:
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        assert_equal_everywhere(every, f"optimizers in any order, {bucket_bytes}")


def scenario_gradients_that_are_discarded_are_warned_of(directory):
    """A generator and a discriminator, whose gradients of the generator's loss are cleared."""
    for freezes in (False, True):
        networks = [named(a=(40, 30)), named(b=(40, 30))]
        every = [pair for network in networks for pair in network.items()]
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.1)), parameters=every, dense_below=0)
        generator, discriminator = (
            hvd.DistributedOptimizer(
                torch.optim.SGD(network.parameters(), lr=0.1),
                named_parameters=network.items(), compression=compressor,
            )
            for network in networks
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                discriminator.zero_grad()
                loss_of(networks[1], step).backward()
                discriminator.step()
                networks[1]["b"].requires_grad_(not freezes)
                generator.zero_grad()
                sum(loss_of(network, 100 + step) for network in networks).backward()
                if not freezes:
                    discriminator.synchronize()  # Horovod raises an error without it
                generator.step()
                networks[1]["b"].requires_grad_(True)
        said = [str(one.message) for one in caught if "before a step of" in str(one.message)]
        expect(len(said) == (not freezes), freezes, said)
        expect(all("the gradient of b was" in text for text in said), said)
        assert_equal_everywhere(every, f"discarded gradients, {freezes}")


def scenario_a_step_that_is_compiled_as_a_whole(directory):
    """Dynamo does not trace the compressor, and the result is that of the same step, eagerly."""

    def trained(compiles):
        torch._dynamo.reset()
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=0)
        dr.prepare(optimizer, compressor)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=network.named_parameters(), compression=compressor
        )

        def step(images):
            optimizer.zero_grad()
            network(images).pow(2).mean().backward()
            optimizer.step()

        run = torch.compile(step, backend="eager") if compiles else step
        for number in range(3):
            run(batch(number))
        return list(network.named_parameters())

    for (name, one), (_, other) in zip(trained(True), trained(False)):
        expect(torch.equal(one, other), name, "differs")


def scenario_the_default_device_does_not_matter(directory):
    """A program may set a default device: the compressor's own tensors stay on the host."""

    def trained(device, memory, dense_below):
        network = model()
        torch.set_default_device(device)
        try:
            optimizer, compressor = distributed(
                network, None, memory, compressor_options={"dense_below": dense_below}
            )
            for step in range(3):
                network.zero_grad()
                with torch.device("cpu"):
                    backward(network, step)
                optimizer.step()
            compressor.load_state_dict(compressor.state_dict())
            return {
                f"{kind} of {name}": part
                for name, saved in compressor.state_dict()["parameters"].items()
                for kind, part in saved["memory"].items()
            } | dict(network.named_parameters())
        finally:
            torch.set_default_device(None)

    for memory in (dr.Residual(), dr.MomentumCorrection(0.9), dr.NoMemory()):
        for dense_below in (0, 50):
            own, other = (trained(device, memory, dense_below) for device in ("meta", "cpu"))
            for name, one in own.items():
                expect(torch.equal(one, other[name]), name, "differs", memory)
