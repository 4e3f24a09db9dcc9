"""Measure how long Horovod takes to sum float16, by the values.

    export PYTHONPATH=.
    horovodrun -np 2 python benchmarks/float16_sums.py

All kinds of values take turns. For each number of bytes, rank 0 prints the median milliseconds of
an allreduce, and their ratio to those of float32. ``schedule="auto"`` measures with random values
that differ between ranks.
"""

import statistics
import time

import horovod.torch as hvd
import numpy as np
import torch

from deepreduce_hvd.planning.measurements import random_values

SIZES = (1 << 22, 1 << 24, 1 << 26)  # bytes
TURNS = 11


def kinds(size):
    """Return {name: tensor of ``size`` bytes}."""
    own, same = (
        torch.from_numpy(np.resize(1e-3 * random_values(seed), size // 2))
        for seed in (hvd.rank(), 0)
    )
    return {
        "float32": own[: size // 4].clone(),
        "float16, zeros": torch.zeros(size // 2, dtype=torch.float16),
        "float16, the same on all ranks": same.half(),
        "float16, other values on each rank": own.half(),
    }


def seconds_of(size):
    """Return {kind of values: median seconds of its allreduce}."""
    found = {}
    for turn in range(-1, TURNS):
        for name, values in kinds(size).items():  # new ones: a sum takes the place of its input
            hvd.barrier()
            started = time.perf_counter()
            hvd.allreduce_(values, name=f"{name}.{size}", op=hvd.Sum)
            if turn >= 0:
                found.setdefault(name, []).append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main():
    hvd.init()
    torch.set_num_threads(1)
    for size in SIZES:
        found = seconds_of(size)
        if hvd.rank() == 0:
            for name, seconds in found.items():
                ratio = seconds / found["float32"]
                print(
                    f"{size >> 20:2} MiB, {name:36}{1e3 * seconds:7.1f} ms {ratio:6.2f}", flush=True
                )


if __name__ == "__main__":
    main()
