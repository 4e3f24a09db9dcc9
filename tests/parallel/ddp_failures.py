"""Errors that one rank meets, or all do, with PyTorch's DDP; started under torchrun by
test_torch_ddp.py. Every rank must end with the cause.
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from ddp_tools import Network, distributed, loss_of

import deepreduce_hvd as dr

rank = int(os.environ["RANK"])


def _step(model, number=0):
    loss_of(model, number, rank).backward()


def other_codec_on_one_rank():
    distributed(Network(), dr.Codec(dr.TopK(0.02 if rank == 1 else 0.05)))


def other_dense_below_on_one_rank():
    distributed(Network(), dense_below=100 if rank == 1 else 200)


def other_communicator_on_one_rank():
    distributed(Network(), communicator=dr.SplitAllgather() if rank == 1 else dr.GTopK())


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
    _step(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _step(model, 1)


def rank_that_stops():
    model, _ = distributed(Network())
    _step(model)
    if rank == 1:
        time.sleep(60)
    _step(model, 1)


def rank_that_ends_early():
    model, _ = distributed(Network())
    _step(model)
    if rank != 1:
        _step(model, 1)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    globals()[sys.argv[1]]()
    print("went on silently", flush=True)
