"""Measure what pipelining and buckets save: seconds per step for ResNet-50's 161 gradients.

    python benchmarks/buckets.py [--ranks 2] [--steps 7]

Compares communicators and bucket sizes under horovodrun. Prints a table and writes
results/buckets.json. There is no forward pass: gradients of real shapes and log-normal values are
given to ``compress`` in the order in which backward makes them ready, then to ``decompress``. Steps
of all settings are interleaved in one run. Rows "in turn" make the same exchanges, but finish each
before the next one starts, as a program without handles would do. The ranks use loopback on one
machine, so the results show latency and processor time, not the bandwidth of a network.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import resnet50
from measure import default_codec, write

ROOT = pathlib.Path(__file__).parent.parent
BUCKETS = [0, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def worker(steps):
    import horovod.torch as hvd
    import torch

    import deepreduce_hvd as dr

    hvd.init()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(hvd.rank())
    parameters = []
    for number, (_, shape) in enumerate(resnet50.shapes()):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        parameter.grad = sign * torch.exp(2 * torch.randn(shape, generator=generator))
        parameters.append((f"p{number}", parameter))
    fresh = [parameter.grad.clone() for _, parameter in parameters]
    codec = default_codec()

    def step(compressor, one_by_one):
        for (_, parameter), gradient in zip(parameters, fresh):
            parameter.grad.copy_(gradient)
        hvd.barrier()
        started = time.perf_counter()
        in_flight = []

        def finish():
            for handle, context in in_flight:
                compressor.decompress(hvd.synchronize(handle), context)
            in_flight.clear()

        for name, parameter in reversed(parameters):
            reduced, context = compressor.compress(parameter.grad)
            in_flight.append((hvd.allreduce_async_(reduced, name=name), context))
            if one_by_one:
                finish()
        finish()
        return time.perf_counter() - started

    settings = {}
    for scheme in (
        dr.Allgather(),
        dr.SplitAllgather(),
        dr.RecursiveDoubling(),
        dr.GTopK(),
        dr.CLTK(),
    ):
        for bucket_bytes in BUCKETS:
            settings[repr(scheme), bucket_bytes, False] = dr.Compressor(
                codec, communicator=scheme, parameters=parameters, bucket_bytes=bucket_bytes
            )
        settings[repr(scheme), 0, True] = settings[repr(scheme), 0, False]
    seconds = {setting: [] for setting in settings}
    for number in range(steps + 1):
        for setting, compressor in settings.items():
            taken = step(compressor, setting[2])
            if number:  # the first step warms up
                seconds[setting].append(taken)
    if hvd.rank() == 0:
        rows = [
            {"communicator": scheme, "bucket_bytes": bucket_bytes, "one_by_one": one_by_one, "median_seconds": statistics.median(taken),
             "fastest": min(taken), "slowest": max(taken), "ranks": hvd.size()}
            for (scheme, bucket_bytes, one_by_one), taken in seconds.items()
        ]  # fmt: skip
        print("RESULT " + json.dumps(rows), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.steps)
        return
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3"
    )
    command = [
        str(launcher),
        "-np",
        str(arguments.ranks),
        sys.executable,
        __file__,
        "--worker",
        "--steps",
        str(arguments.steps),
    ]
    finished = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if "RESULT " in line]
    if not lines:
        raise SystemExit(
            f"horovodrun ended with {finished.returncode} and no result:\n{finished.stdout[-4000:]}"
        )
    rows = json.loads(lines[0].partition("RESULT ")[2])
    print(f"{'communicator':34}{'bucket MiB':>12}{'ms per step':>12}   fastest to slowest")
    for row in rows:
        bucket = "one by one" if row["one_by_one"] else row["bucket_bytes"] >> 20
        figures = [1e3 * row[field] for field in ("median_seconds", "fastest", "slowest")]
        print(
            f"{row['communicator']:34}{bucket:>12}{figures[0]:12.1f}   {figures[1]:.1f} "
            f"to {figures[2]:.1f}"
        )
    write(ROOT / "results" / "buckets.json", rows)


if __name__ == "__main__":
    main()
