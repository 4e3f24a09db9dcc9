"""Errors that one rank meets, or all do, with PyTorch's DDP; started under torchrun by
test_torch_ddp.py. Every rank must end with the cause.
"""

import contextlib
import os
import signal
import time

import forked_failures
import torch
from ddp_tools import Network, distributed, loss_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr

rank = int(os.environ["RANK"])
#: seconds for which a rank lives on after its failure: the others must not learn of it by its end
_STAYS_ALIVE = 4.0


def _step(model, number=0):
    loss_of(model, number, rank).backward()


def _begin(model):
    """Make two steps. In the second one, DDP communicates to rebuild its buckets."""
    _step(model)
    _step(model, 1)


def other_codec_on_one_rank():
    distributed(Network(), dr.Codec(dr.TopK(0.02 if rank == 1 else 0.05)))


def other_dense_below_on_one_rank():
    distributed(Network(), dense_below=100 if rank == 1 else 200)


def other_communicator_on_one_rank():
    distributed(Network(), communicator=dr.SplitAllgather() if rank == 1 else dr.GTopK())


def other_order_on_one_rank():
    network = Network()
    model = DistributedDataParallel(network)
    named = list(network.named_parameters())
    compressor = dr.Compressor(parameters=named[::-1] if rank == 1 else named)
    compressor.register(model)
    _step(model)


def other_buckets_on_one_rank():
    # otherwise DDP takes the buckets of rank 0 from the second step on
    ddp = {"bucket_cap_mb": 0.01 if rank == 1 else 25, "find_unused_parameters": True}
    model, _ = distributed(Network(), ddp=ddp)
    _step(model)


def other_layers_frozen_on_one_rank():
    network = Network()
    if rank == 1:
        network.branch.requires_grad_(False)
    model, _ = distributed(network)
    _step(model)


def compressor_on_one_rank_only():
    if rank == 1:
        distributed(Network())
    else:
        _step(DistributedDataParallel(Network()))


def hook_of_pytorch_on_one_rank():
    if rank == 1:
        model, _ = distributed(Network())
    else:
        model = DistributedDataParallel(Network())
        model.register_comm_hook(None, fp16_compress_hook)
    _step(model)


def step_without_synchronization_on_one_rank():
    model, _ = distributed(Network())
    _step(model)
    with model.no_sync() if rank == 1 else contextlib.nullcontext():
        _step(model, 1)
    _step(model, 2)


def payload_that_is_corrupt():
    model, compressor = distributed(Network())
    _step(model)
    if rank == 1:
        host_path = compressor.adapter.host_path
        member = host_path.member

        def damaged(*arguments):
            made = member(*arguments)
            encode = made.encode
            made.encode = lambda bucket: encode(bucket)[:-3]
            return made

        host_path.member = damaged
    _step(model, 1)


def exception_in_backward_on_one_rank():
    model, _ = distributed(Network(), ddp={"bucket_cap_mb": 0.01})
    _step(model)

    def stumble(gradient):
        if rank == 1:
            raise LookupError("a bad batch")

    model.module.convolution.weight.register_hook(stumble)
    _step(model, 1)


def other_steps_on_one_rank():
    model, compressor = distributed(Network())
    _step(model)
    if rank == 1:
        for slot in compressor.adapter.slots.values():
            slot.steps += 1
    _step(model, 1)


def encoding_that_fails_on_one_rank():
    model, compressor = distributed(Network())
    _step(model)
    if rank == 1:
        compressor.adapter.slots["branch.weight"].state = (torch.zeros(3),)
    _step(model, 1)


def loss_scale_that_fails_on_one_rank():
    def scale():
        if rank == 1:
            raise KeyError("no scale today")
        return 8.0

    model, _ = distributed(Network(), loss_scale=scale)
    _step(model)


def rank_that_fails_before_sums_in_hosts():
    def scale():
        if rank == 1:
            raise KeyError("no scale today")
        return 8.0

    model, _ = distributed(
        Network(), communicator=dr.Hierarchical(dr.Allgather(), 1), loss_scale=scale
    )
    try:
        _step(model)
    finally:
        time.sleep(_STAYS_ALIVE)


def writer_that_fails_on_one_rank():
    class Writer:
        def add_scalar(self, *arguments, **options):
            raise OSError("the disk is full")

    model, _ = distributed(Network(), writer=Writer() if rank == 1 else None, writer_interval=1)
    _step(model)
    try:
        _step(model, 1)  # what the first step is written in
    finally:
        time.sleep(_STAYS_ALIVE)


def dense_gradients_that_fail_on_one_rank():
    model, compressor = distributed(Network(), dense_below=1 << 20)
    _step(model)
    if rank == 1:
        compressor.adapter.slots["branch.weight"].count_dense = None
    _step(model, 1)  # this rank fails after the last collective
    _step(model, 2)


def exception_on_one_rank():
    model, _ = distributed(Network())
    _step(model)
    if rank == 1:
        raise LookupError("the data has ended")
    _step(model, 1)


def rank_that_is_killed():
    model, _ = distributed(Network())
    _begin(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _step(model, 2)


def rank_that_is_killed_between_rounds():
    model, compressor = distributed(Network(), communicator=dr.GTopK())
    _begin(model)
    if rank == 1:
        transport, gathers = compressor.adapter.transport, []
        run = transport._heads

        def die_in_the_second(name, sizes):
            gathers.append(name)
            if len(gathers) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(name, sizes)

        transport._heads = die_in_the_second
    _step(model, 2)


def rank_that_is_stopped():
    model, _ = distributed(Network())
    _begin(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _step(model, 2)


def rank_that_hangs():
    model, _ = distributed(Network())
    _begin(model)
    if rank == 1:
        time.sleep(60)
    _step(model, 2)


def rank_that_ends_early():
    model, _ = distributed(Network())
    _begin(model)
    if rank != 1:
        _step(model, 2)


if __name__ == "__main__":
    forked_failures.main(globals())
