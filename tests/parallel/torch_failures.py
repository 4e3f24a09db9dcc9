"""Errors that one rank meets, or all do: the job must end with a message on every rank. Started
under horovodrun.
"""

import sys

import horovod.torch as hvd
import torch
from torch_tools import backward, distributed, model

import deepreduce_hvd as dr


def bad_gradient_type_on_one_rank():
    dtype = torch.complex64 if hvd.rank() == 1 else torch.float32
    network = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(200, dtype=dtype))})
    optimizer, _ = distributed(network)
    network["weight"].abs().sum().backward()
    optimizer.step()


def other_codec_on_one_rank():
    network = model()
    optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05)))
    backward(network, 0)
    optimizer.step()


def other_k_in_rounds():
    network = model()
    codec = dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05))
    optimizer, _ = distributed(network, codec, compressor_options={"communicator": dr.CLTK()})
    backward(network, 0)
    optimizer.step()


def other_communicator_on_one_rank():
    network = model()
    communicator = dr.SplitAllgather() if hvd.rank() == 1 else dr.GTopK()
    optimizer, _ = distributed(network, compressor_options={"communicator": communicator})
    backward(network, 0)
    optimizer.step()


def other_order_on_one_rank():
    network = model()
    named = list(network.named_parameters())
    ordered = named[::-1] if hvd.rank() == 1 else named
    compressor = dr.Compressor(dr.Codec(dr.TopK(0.05)), parameters=ordered, dense_below=50)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compressor)
    backward(network, 0)
    optimizer.step()


def other_layers_frozen_on_one_rank():
    network = model()
    optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.05)))
    for step in range(2):
        if step == 1:
            network[2 if hvd.rank() == 1 else 0].weight.requires_grad_(False)
        optimizer.zero_grad()
        backward(network, step)
        optimizer.step()


def adasum():
    network = model()
    optimizer, _ = distributed(network, op=hvd.Adasum)
    backward(network, 0)
    optimizer.step()


def other_process_set():
    network = model()
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    optimizer, _ = distributed(network, compressor_options={"process_set": alone[hvd.rank()]})
    backward(network, 0)
    optimizer.step()


def min_as_the_operation():
    network = model()
    optimizer, _ = distributed(network, op=hvd.Min)
    backward(network, 0)
    optimizer.step()


def unnamed_gradient():
    network, other = model(), model()
    _, compressor = distributed(other)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )
    backward(network, 0)
    optimizer.step()


def elastic_state_without_the_compressor():
    network = model()
    optimizer, _ = distributed(network)

    @hvd.elastic.run
    def train(state):
        backward(network, 0)
        optimizer.step()

    train(hvd.elastic.TorchState(model=network, optimizer=optimizer))


if __name__ == "__main__":
    hvd.init()
    globals()[sys.argv[1]]()
    print("went on silently")
