"""Measure what a gradient costs besides its elements: steps of many small gradients on PyTorch.

    python benchmarks/torch_overhead.py [--gradients 62] [--elements 4096] [--steps 400] [--ranks 2]

Each row is a real step under horovodrun: forward, backward, Horovod's reduction and SGD. The rows
take turns. Printed is the fastest twentieth of the steps, and of the processor time of the thread
that runs them, which other programs on the machine change less. The last column is the processor
time per gradient beyond a step without an exchange.
"""

import argparse
import sys
import time

from folders import EXAMPLES, module_at

LOCAL = "no exchange"
_WARM_UP = 60  # steps of each row: the default codec's warm-up, and Horovod's cache


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gradients", type=int, default=62, help="as many as ResNet-18 has")
    parser.add_argument("--elements", type=int, default=4096, help="of each gradient")
    parser.add_argument("--steps", type=int, default=400, help="timed steps of each row")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options):
    import horovod.torch as hvd
    import torch

    import deepreduce_hvd as dr

    hvd.init()
    torch.set_num_threads(1)

    def train(row):
        """Return the parameters and the optimizer of a row."""
        torch.manual_seed(0)
        parameters = [
            torch.nn.Parameter(torch.randn(options.elements)) for _ in range(options.gradients)
        ]
        named = [(f"{row} {number}", one) for number, one in enumerate(parameters)]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        if row == LOCAL:
            return parameters, optimizer
        compression = {
            "Horovod none": hvd.Compression.none,
            "Horovod fp16": hvd.Compression.fp16,
        }.get(row) or dr.Compressor(parameters=named)
        return parameters, hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )

    rows = {row: train(row) for row in (LOCAL, "Horovod none", "Horovod fp16", "default")}

    def step(row):
        """Return the seconds of a step, and of the processor in this thread."""
        parameters, optimizer = rows[row]
        started, processor = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        sum((one * inputs).sum() for one in parameters).backward()
        optimizer.step()
        return time.perf_counter() - started, time.thread_time() - processor

    inputs = torch.randn(options.elements, generator=torch.Generator().manual_seed(hvd.rank()))
    found = {row: [] for row in rows}
    for turn in range(_WARM_UP + options.steps):
        for row, steps in found.items():
            hvd.allreduce(torch.zeros(1), name="together")
            spent = step(row)
            if turn >= _WARM_UP:
                steps.append(spent)
    if hvd.rank():
        return
    fast = {
        row: [sorted(kind)[len(steps) // 20] for kind in zip(*steps)]
        for row, steps in found.items()
    }
    print(f"{'':<16}{'step':>10}{'thread':>12}{'per gradient':>16}")
    for row, (whole, processor) in fast.items():
        beyond = (processor - fast[LOCAL][1]) / options.gradients
        print(f"{row:<16}{1e3 * whole:>7.2f} ms{1e3 * processor:>9.2f} ms{1e6 * beyond:>13.1f} us")


def main():
    options = parse()
    if options.worker:
        measure(options)
        return 0
    return module_at(EXAMPLES / "ranks.py").launch(__file__, options.ranks, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
