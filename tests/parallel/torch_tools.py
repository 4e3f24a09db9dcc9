"""Shared by the PyTorch scenarios: a small model, its distributed optimizer, and checks.

The checks compare all ranks.
"""

import horovod.torch as hvd
import numpy as np
import scenario_runner
import torch

import deepreduce_hvd as dr


def model(seed=0, dtype=torch.float32, outputs=3):
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(48, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, outputs),
    )
    return layers.to(dtype)


def distributed(
    network, codec=None, memory=None, optimizer=None, compressor_options=None, **options
):
    """Return (optimizer, compressor) of stock Horovod for ``network``."""
    named = list(network.named_parameters())
    settings = {"dense_below": 50, **(compressor_options or {})}
    compressor = dr.Compressor(
        codec or dr.Codec(dr.TopK(0.05)), memory, parameters=named, **settings
    )
    optimizer = optimizer or torch.optim.SGD(network.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compressor, **options
    ), compressor


def follow_layout(compressor):
    """Give later steps the layout that a test has set, as all ranks do between two steps."""
    adapter = compressor.adapter
    layouts = adapter._steps._layouts
    layouts.change(adapter.scheduler.layout, adapter.slots, layouts.begun(adapter.slots))


#: From three ranks on, Horovod's own sums of uncompressed gradients depend on which of them it
#: happens to fuse. Sums of payloads do not.
ALL_COMPRESSED = {"dense_below": 0}


def batch(step, rank=None, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(size, 48, generator=generator, dtype=torch.float32).to(dtype)


def backward(network, step, rank=None):
    parameter = next(network.parameters())
    network(batch(step, rank, dtype=parameter.dtype)).pow(2).mean().backward()


def assert_equal_everywhere(tensors, what, process_set=hvd.global_process_set):
    """Check that (name, tensor) pairs are bit-identical on all ranks of the set."""
    own = np.concatenate([tensor.detach().double().reshape(-1).numpy() for _, tensor in tensors])
    gathered = hvd.allgather(
        torch.from_numpy(own).view(1, -1), name=f"check.{what}", process_set=process_set
    )
    for rank, other in enumerate(gathered):
        assert torch.equal(other, gathered[0]), f"{what}: rank {rank} differs from rank 0"


def gradients(network):
    return [(name, parameter.grad.clone()) for name, parameter in network.named_parameters()]


def local_gradients(network, step, rank=None):
    """Return {name: gradient} of a rank's batch, by default this rank's.

    It is computed by a separate backward pass on a copy of the network.
    """
    copy = model(dtype=next(network.parameters()).dtype)
    copy.load_state_dict(network.state_dict())
    backward(copy, step, rank)
    return dict(gradients(copy))


def train(steps, codec=None, memory=None, sparsity=0.05, **options):
    network = model()
    optimizer, compressor = distributed(
        network, codec or dr.Codec(dr.TopK(sparsity)), memory, **options
    )
    for step in range(steps):
        network.zero_grad()
        backward(network, step)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {step} {sorted(options)}")
    return network, compressor


def sum_over_ranks(tensor, name):
    return hvd.allreduce(tensor.double(), op=hvd.Sum, name=name)


def run_all(namespace, directory):
    scenario_runner.run_all(namespace, directory, hvd, hvd.barrier)


def parts_on(*process_sets):
    """Return (network, optimizer) for each of these process sets that has this rank."""
    parts = []
    for number, process_set in enumerate(process_sets):
        if process_set.included():
            network = model()
            names = [(f"part{number}.{name}", one) for name, one in network.named_parameters()]
            compressor = dr.Compressor(parameters=names, dense_below=50, process_set=process_set)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(
                optimizer, names, compression=compressor, process_set=process_set
            )
            parts.append((network, optimizer))
    return parts
