"""Programs on stock Horovod with PyTorch that do not just step: other orders on each rank, gradients
that are discarded, steps that are compiled. Run by torch_several.py.
"""

import gc
import random
import warnings

import horovod.torch as hvd
import torch
from scenario_runner import refused, texts_of_warnings
from torch_gradients_tools import expect, loss_of, named
from torch_tools import ALL_COMPRESSED, assert_equal_everywhere, backward, batch, distributed, model

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


def scenario_a_complex_parameter_that_is_trained_later_is_named(directory):
    """It is frozen when the optimizer is created, so Horovod does not exchange its gradients."""
    network = model()
    network.phases = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    optimizer, _ = distributed(network)

    def train():
        for step in range(3):
            network.zero_grad()
            (network(batch(step)) * network.phases).abs().mean().backward()
            optimizer.step()

    for is_trained in (False, True):
        network.phases.requires_grad_(is_trained)
        texts = [text for text in texts_of_warnings(train) if "that was not exchanged" in text]
        assert ["gradient of phases" in text for text in texts] == [True] * is_trained, texts


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


def scenario_the_default_device_and_dtype_do_not_matter(directory):
    """The compressor's own tensors stay on the host and float32."""

    def trained(device, dtype, memory, dense_below):
        network = model()
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
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
            torch.set_default_dtype(torch.float32)

    for memory in (dr.Residual(), dr.MomentumCorrection(0.9), dr.NoMemory()):
        for dense_below in (0, 50):
            expected = trained("cpu", torch.float32, memory, dense_below)
            for default in (("meta", torch.float32), ("cpu", torch.float64)):
                for name, one in trained(*default, memory, dense_below).items():
                    expect(torch.equal(one, expected[name]), name, "differs", memory, default)


def scenario_an_optimizer_may_be_created_again(directory):
    """No hook of the compressor keeps an optimizer that the program has deleted."""
    for loss_scale, memory in ((lambda: 1.0, dr.Residual()), (None, dr.MomentumCorrection(0.9))):
        network = model()
        named = list(network.named_parameters())
        compressor = dr.Compressor(
            memory=memory, parameters=named, dense_below=0, loss_scale=loss_scale
        )
        for phase in range(3):
            optimizer = None
            gc.collect()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(network.parameters(), lr=0.01),
                named_parameters=named,
                compression=compressor,
            )
            for step in range(2):
                optimizer.zero_grad()
                backward(network, 10 * phase + step)
                optimizer.step()
        assert_equal_everywhere(named, f"created again, {memory}")


def scenario_gradients_that_the_program_sets(directory):
    """Tables are found, and Adam has no momentum for the rest, if ``.grad`` is set by hand."""
    network = torch.nn.Sequential(torch.nn.Embedding(400, 16), torch.nn.Linear(16, 100))
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    named = list(network.named_parameters())
    compressor = dr.Compressor(parameters=named)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    dr.prepare(optimizer, compressor)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compressor)
    for step in range(4):
        loss = network(torch.arange(8) + 8 * step + hvd.rank()).pow(2).mean()
        gradients = torch.autograd.grad(loss, [one for _, one in named])
        for (_, parameter), gradient in zip(named, gradients):
            parameter.grad = gradient
        optimizer.step()
    saved = compressor.state_dict()["parameters"]
    expect([saved[name]["is_table"] for name in ("0.weight", "1.weight")] == [True, False], saved)
    weight = network[1].weight
    expect(torch.allclose(optimizer.state[weight]["exp_avg"], weight.grad), "momentum in use")


def scenario_a_second_reduction_is_refused_with_sparse_gradients_too(directory):
    """``step()`` after ``synchronize()`` would undo the clipping of the other parameters."""
    for sparse in (True, False):
        network = torch.nn.Sequential(
            torch.nn.Embedding(50, 48, sparse=sparse), torch.nn.Linear(48, 30)
        )
        optimizer, _ = distributed(network, compressor_options=ALL_COMPRESSED)
        optimizer.zero_grad()
        network(torch.arange(3)).sum().backward()
        optimizer.synchronize()
        with refused("around step\\(\\) after synchronize"):
            optimizer.step()
