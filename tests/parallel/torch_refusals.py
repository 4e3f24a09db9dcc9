"""Test errors of one rank, and usage that is an error on every rank, with PyTorch.

Every rank must get an error and continue with the next scenario. Run by torch_scenarios.py.
"""

import horovod.torch as hvd
import torch
from scenario_runner import refused
from torch_tools import backward, distributed, model

import deepreduce_hvd as dr


def scenario_other_k_in_rounds(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        codec = dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05))
        optimizer, _ = distributed(network, codec, compressor_options={"communicator": dr.CLTK()})
        backward(network, 0)
        optimizer.step()


def scenario_other_communicator_on_one_rank(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        communicator = dr.SplitAllgather() if hvd.rank() == 1 else dr.GTopK()
        optimizer, _ = distributed(network, compressor_options={"communicator": communicator})
        backward(network, 0)
        optimizer.step()


def scenario_other_order_on_one_rank(directory):
    with refused(r"expected the same compressor configuration on every rank"):
        network = model()
        named = list(network.named_parameters())
        ordered = named[::-1] if hvd.rank() == 1 else named
        compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=ordered, dense_below=50)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compressor
        )
        backward(network, 0)
        optimizer.step()


def scenario_other_layers_frozen_on_one_rank(directory):
    with refused(r"freeze the same ones"):
        network = model()
        optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.05)))
        for step in range(2):
            if step == 1:
                network[2 if hvd.rank() == 1 else 0].weight.requires_grad_(False)
            optimizer.zero_grad()
            backward(network, step)
            optimizer.step()


def scenario_adasum(directory):
    with refused(r"expected a gradient, got a parameter, which op=Adasum passes"):
        network = model()
        optimizer, _ = distributed(network, op=hvd.Adasum)
        backward(network, 0)
        optimizer.step()


def scenario_min_as_the_operation(directory):
    with refused(r"expected Horovod to sum or average"):
        network = model()
        optimizer, _ = distributed(network, op=hvd.Min)
        backward(network, 0)
        optimizer.step()


def scenario_unnamed_gradient(directory):
    with refused(r"expected the gradient of one of the 6 named parameters"):
        network, other = model(), model()
        _, compressor = distributed(other)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1),
            named_parameters=network.named_parameters(),
            compression=compressor,
        )
        backward(network, 0)
        optimizer.step()


def scenario_elastic_state_without_the_compressor(directory):
    with refused(r"elastic training: expected an elastic state with the compressor"):
        network = model()
        optimizer, _ = distributed(network)

        @hvd.elastic.run
        def train(state):
            backward(network, 0)
            optimizer.step()

        train(hvd.elastic.TorchState(model=network, optimizer=optimizer))
