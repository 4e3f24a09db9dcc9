"""One rank of benchmarks/hosts.py: measure exchanges of ResNet-50's gradients.

It measures seconds per step and the bytes on the network interface of its host. The gradients are
prepared before, fixed by rank and step. They reach the optimizer's hooks through a real backward
pass of operations that only return them, so no forward pass is measured.
"""

import gc
import itertools
import json
import statistics
import sys
import time

import horovod.torch as hvd
import numpy as np
import resnet50
import torch
from links import interface_counters

import deepreduce_hvd as dr

RATIO = 0.01
_DISTINCT_STEPS = 3  # number of steps with different gradients; they repeat
_WARM_UP = 3  # steps that do not count
_FEWEST, _MOST = 4, 15


def _instance(codec, communicator=None, memory=None):
    """Return a function of named parameters that makes the ``compression`` and its compressor."""

    def make(named):
        compressor = dr.Compressor(codec, memory, communicator, parameters=named)
        return compressor, compressor

    return make


def _table():
    """Return {row: function that makes its compression}; None stands for no Horovod at all.

    Communicators have their default settings.
    """
    from deepreduce_hvd import communicators

    recommended = dr.Codec(dr.TopK(RATIO), index=dr.Rice(), value=dr.QSGD(bits=4))
    chunks = dr.Codec(dr.ChunkTopK(RATIO), index=dr.Rice(), value=dr.QSGD(bits=4))
    return {
        "no exchange": None,
        "none": lambda named: (hvd.Compression.none, None),
        "fp16": lambda named: (hvd.Compression.fp16, None),
        "Allgather": _instance(recommended),
        "Allgather, chunks": _instance(chunks),
        "Allgather, Top-r pairs": _instance(dr.Codec(dr.TopK(RATIO))),
        "SplitAllgather": _instance(recommended, communicators.SplitAllgather()),
        "RecursiveDoubling": _instance(recommended, communicators.RecursiveDoubling()),
        "Auto": _instance(recommended, communicators.Auto()),
        "GTopK": _instance(recommended, communicators.GTopK()),
        "CLTK": _instance(chunks, communicators.CLTK(), dr.LowPass(0.1)),
        "SharedRandomK": _instance(dr.Codec(dr.RandomK(RATIO)), communicators.SharedRandomK()),
    }


ROWS = _table()


class _Prepared(torch.autograd.Function):
    """An operation on a parameter whose gradient is given."""

    @staticmethod
    def forward(context, parameter, gradient):
        context.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(context, _):
        return context.gradient, None


def _start_together():
    """A barrier whose waiting ranks sleep.

    Horovod's own barrier would take processor time from the ranks that are waited for.
    """
    handle = hvd.allreduce_async(torch.zeros(1), name="start")
    while not hvd.poll(handle):
        time.sleep(1e-4)
    hvd.synchronize(handle)


class Exchange:
    """Parameters of ResNet-50's shapes, their prepared gradients, and a step with nothing else."""

    def __init__(self, gradients, make):
        self.named = [
            (name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in resnet50.shapes()
        ]
        self.parameters = [parameter for _, parameter in self.named]
        self.gradients = itertools.cycle(gradients)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-3)
        self.compressor = None
        if make is not None:
            compression, self.compressor = make(self.named)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.named, compression=compression
            )

    def step(self):
        """Make a step; return the seconds that this rank took."""
        gradients = next(self.gradients)
        _start_together()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        torch.stack(
            [_Prepared.apply(*pair) for pair in zip(self.parameters, gradients)]
        ).sum().backward()
        self.optimizer.step()
        return time.perf_counter() - started


def prepared_gradients():
    """Return the gradients of all parameters for each of a few steps.

    They have log-normal magnitudes and random signs.
    """
    sizes = [int(np.prod(shape)) for _, shape in resnet50.shapes()]
    steps = []
    for step in range(_DISTINCT_STEPS):
        random = np.random.default_rng((hvd.rank(), step))
        values = random.standard_normal(sum(sizes), dtype=np.float32)
        magnitudes = np.abs(values, out=np.empty_like(values))
        # separate draws for magnitude and sign, because the absolute value of a normal is not
        # log-normal
        np.exp(random.standard_normal(out=magnitudes, dtype=np.float32), out=magnitudes)
        flat = torch.from_numpy(np.copysign(1e-3 * magnitudes, values, dtype=np.float32))
        steps.append(
            [part.view(shape) for part, (_, shape) in zip(flat.split(sizes), resnet50.shapes())]
        )
    return steps


def _claimed_bytes(name, exchange):
    """Return the bytes that this rank reports to hand to collectives per step."""
    if exchange.compressor is not None:
        return sum(row["sent_bytes"] for row in exchange.compressor.stats().values())
    dense = 4 * sum(parameter.numel() for parameter in exchange.parameters)
    return {"no exchange": 0, "none": dense, "fp16": dense // 2}[name]


def measure(name, gradients, seconds):
    """Measure one row; return a dictionary that is the same on all ranks."""
    exchange = Exchange(gradients, ROWS[name])
    slow = [exchange.step() for _ in range(_WARM_UP if exchange.compressor is not None else 1)][-1]
    repeats = hvd.broadcast_object(min(_MOST, max(_FEWEST, round(seconds / slow))))
    hvd.barrier()
    before, started = interface_counters(), time.perf_counter()
    own = [exchange.step() for _ in range(repeats)]
    after, spent = interface_counters(), time.perf_counter() - started
    of_ranks = hvd.allgather_object({
        "times": own, "wall_seconds": spent, "claimed": _claimed_bytes(name, exchange),
        **{figure: (after[figure] - before[figure]) / repeats for figure in after},
    })  # fmt: skip
    # a step ends when its last rank ends
    times = [max(rank["times"][step] for rank in of_ranks) for step in range(repeats)]
    row = {
        "name": name,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
        "steps": repeats,
    }
    row["claimed_bytes"] = [rank["claimed"] for rank in of_ranks]
    for figure in after:
        row[figure] = [round(rank[figure]) for rank in of_ranks]
    del exchange
    gc.collect()
    return row


def main(names, seconds):
    hvd.init()
    torch.set_num_threads(1)
    gradients = prepared_gradients()
    for name in names:
        row = measure(name, gradients, seconds)
        if hvd.rank() == 0:
            print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(";"), float(sys.argv[2]))
