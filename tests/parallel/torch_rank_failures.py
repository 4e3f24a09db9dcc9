"""Train with PyTorch until one rank hangs, is killed, ends or raises an error.

Started as one rank of a job.
"""

import signal
import sys

import horovod.torch as hvd
import torch
from rank_failures import STEP, meet, raise_an_error
from torch_tools import backward, distributed, model


def main(failure):
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    network = model()
    optimizer, _ = distributed(network)
    step = 0

    def stumble(_):
        if last and step == STEP:
            raise_an_error()

    if failure == "raises in backward":
        next(network.parameters()).register_hook(stumble)
    while True:
        if last and step == STEP:
            meet(failure)
        if step == STEP and failure == "counts other collectives":
            for _ in range(1 + last):
                hvd.allreduce(torch.ones(1))  # without a name
        optimizer.zero_grad()
        backward(network, step)
        optimizer.step()
        step += 1


if __name__ == "__main__":
    signal.alarm(120)  # ends this process even if the test is killed
    torch.set_num_threads(1)
    main(sys.argv[1])
