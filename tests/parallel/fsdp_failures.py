"""Raise errors on one rank, or on all, with PyTorch's fully_shard.

Started under torchrun by test_torch_fsdp.py on two hosts of two ranks. Every rank must end with the
cause.
"""

import os
import signal

import forked_failures
import torch
from ddp_tools import Network
from fsdp_tools import WHOLE, loss_of, meshes, shard, sharded

import deepreduce_hvd as dr

rank = int(os.environ["RANK"])


def _step(network, number=0, branch=True):
    loss_of(network, number, rank, branch).backward()


def _sharded(**options):
    network = Network()
    return network, sharded(network, meshes(2), **options)


def other_codec_on_one_rank():
    _sharded(codec=dr.Codec(dr.TopK(0.02 if rank == 1 else 0.05)))


def other_dense_below_on_one_host():
    _sharded(dense_below=100 if rank > 1 else 200)


def other_groups_on_one_host():
    _sharded(**({"calls": WHOLE} if rank > 1 else {}))


def other_parameters_on_one_host():
    network, _ = _sharded()
    _step(network, 0, branch=rank > 1)


def other_steps_on_one_rank():
    network, compressor = _sharded()
    _step(network)
    if rank == 1:
        for slot in compressor.adapter.slots.values():
            slot.steps += 1
    _step(network, 1)


def encoding_that_fails_on_one_rank():
    network, compressor = _sharded()
    _step(network)
    if rank == 1:
        compressor.adapter.slots["branch.weight"].state = (torch.zeros(3),)
    _step(network, 1)


def encoding_that_fails_in_a_thread_of_one_rank():
    network, mesh = torch.nn.Linear(200, 200), meshes(2)
    shard(network, mesh["ranks"], WHOLE)
    compressor = dr.Compressor(parameters=network.named_parameters())
    compressor.register(network, mesh["hosts"])
    for number in range(2):
        if (rank, number) == (1, 1):
            compressor.adapter.slots["weight"].state = (torch.zeros(3),)
        network(torch.randn(4, 200)).sum().backward()


def loss_scale_that_fails_on_one_rank():
    def scale():
        if rank == 1:
            raise KeyError("no scale today")
        return 8.0

    network, _ = _sharded(loss_scale=scale)
    _step(network)


def exception_on_one_rank():
    network, _ = _sharded()
    _step(network)
    if rank == 1:
        raise LookupError("the data has ended")
    _step(network, 1)


def rank_that_is_killed():
    network, _ = _sharded()
    _step(network)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _step(network, 1)


if __name__ == "__main__":
    forked_failures.main(globals())
