"""Measure the cost of the roll call per training step, with real forward and backward passes.

    horovodrun -np 2 python benchmarks/roll_call.py

Steps with and without the roll call alternate in one run, so both see the same machine. Rank 0
prints for each model: the median step without the roll call, the median difference of neighboring
steps, and the ratio of the medians.
"""

import argparse
import statistics
import time

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr


class AllThere:
    """A roll call without communication."""

    sent_bytes = 0

    def expect_all(self):
        return iter(())


def models():
    """Return {name: (model, input)}."""
    wide = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU()))
    )
    convolutions = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(4096, 256),
        torch.nn.ReLU(), torch.nn.Linear(256, 10),
    )  # fmt: skip
    return {
        "one layer, 10,000 elements": (torch.nn.Linear(100, 100), torch.randn(8, 100)),
        "four linear layers, 1.05 million elements": (wide, torch.randn(32, 512)),
        "two convolutions and two linear layers, 1.07 million elements": (
            convolutions,
            torch.randn(32, 3, 32, 32),
        ),
    }


def measure(model, inputs, steps):
    """Return the seconds of each step with the roll call, and without."""
    compressor = dr.Compressor(parameters=model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compressor
    )
    usual = compressor.adapter._call_ranks
    times = [], []
    for number in range(-10, 2 * steps):
        without = number % 2
        compressor.adapter._call_ranks = (lambda label: AllThere()) if without else usual
        hvd.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if number >= 0:
            times[without].append(time.perf_counter() - started)
    return times


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="timed steps of each kind (default 300)"
    )
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    for name, (model, inputs) in models().items():
        with_it, without = measure(model, inputs, arguments.steps)
        difference = statistics.median(a - b for a, b in zip(with_it, without))
        usual = statistics.median(without)
        ratio = statistics.median(with_it) / usual
        if hvd.rank() == 0:
            print(
                (
                    f"{name}: {1e3 * usual:.2f} ms without, {1e3 * difference:+.3f} ms with "
                    f"it, ratio {ratio:.3f}"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
