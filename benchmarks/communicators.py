"""Measure what communicators compute, without a network: seconds per rank against Allgather's.

    python benchmarks/communicators.py [--ranks 2,4,8] [--steps 9]

Prints a table and writes results/communicators.json. The simulator runs all ranks in this process,
one after another, with gradients of ResNet-50's shapes and log-normal magnitudes, the default
codec at 1 % and the default buckets. A step of every communicator follows one of Allgather, and
each figure is the median ratio of such pairs, so a drift of the machine's speed cancels. The
columns divide a rank's time: encode (Allgather's selection and encoding), select, code (encoding of
partial sums), put back (into memories), merge (decoding and adding), keep (the k largest of a
partial sum), and add (the sum to the gradient; for Allgather with decoding).
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import statistics
import time
from unittest import mock

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
import resnet50  # noqa: E402
from measure import default_codec, heavy_tailed, row, verdict, write  # noqa: E402

import deepreduce_hvd as dr  # noqa: E402
from deepreduce_hvd.communicators import bucket, doubling, gtopk, split_allgather, sums  # noqa: E402
from deepreduce_hvd.communicators.simulator import Simulator  # noqa: E402
from deepreduce_hvd.planning.layout import assign_to_buckets  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results" / "communicators.json"
SCHEMES = (dr.GTopK(), dr.GTopK(form="tree"), dr.RecursiveDoubling(), dr.SplitAllgather())
#: (communicator, ranks) -> largest ratio to Allgather
TARGETS = {("GTopK(form='butterfly')", 2): 1.2}
BUCKET_BYTES = 64 << 20
_WARM_UP = 2
_PARTS = {
    "encode": [(bucket.Bucket, "encode")],
    "select": [(bucket.Bucket, "select")],
    "code": [(bucket.Bucket, "code")],
    "put back": [(bucket.Bucket, "put_back")],
    "merge": [(doubling, "merged"), (split_allgather, "merged"), (split_allgather, "_joined")],
    "keep": [(gtopk, "keep_largest")],
    "add": [(sums.GatheredPayloads, "add_to"), (sums.CompleteSum, "add_to")],
}


class Clock:
    """Seconds by part. Time of a part within another one counts only for the inner one."""

    def __init__(self):
        self.seconds = collections.Counter()
        self._inner = [0.0]

    def timed(self, part, function):
        @functools.wraps(function)
        def call(*arguments, **options):
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                whole = time.perf_counter() - started
                self.seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return call

    @contextlib.contextmanager
    def running(self):
        with contextlib.ExitStack() as stack:
            for part, places in _PARTS.items():
                for owner, name in places:
                    function = self.timed(part, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, function))
            yield


class Job:
    """All ranks of one communicator, with their memories."""

    def __init__(self, scheme, gradients):
        self.scheme = scheme
        self.gradients = gradients
        self.sizes = [gradient.size for gradient in gradients[0]]
        self.groups = assign_to_buckets(self.sizes, BUCKET_BYTES)
        self.codec, self.memory = default_codec(), dr.Residual()
        self.states = [[np.zeros(d, np.float32) for d in self.sizes] for _ in gradients]
        self.thresholds = [[np.zeros(1, np.float32) for _ in self.sizes] for _ in gradients]
        self.out = [np.zeros(d, np.float32) for d in self.sizes]
        self.number = 0

    def step(self):
        """Exchange all gradients; return the seconds of one rank."""
        size = len(self.gradients)
        started = time.perf_counter()
        for group in self.groups:
            buckets = [self._bucket(group, rank) for rank in range(size)]
            for total in Simulator(size).run(self.scheme, buckets):
                if isinstance(total, Exception):
                    raise total
                for place, number in enumerate(group):
                    total.add_to(place, self.out[number], 1 / size)
        self.number += 1
        return (time.perf_counter() - started) / size

    def _bucket(self, group, rank):
        members = [
            bucket.BucketMember(
                str(number),
                self.gradients[rank][number],
                (self.states[rank][number],),
                number,
                threshold=self.thresholds[rank][number],
            )
            for number in group
        ]
        return bucket.Bucket(self.codec, self.memory, members, step=self.number, rank=rank)


def measure(ranks, steps):
    """Return one row per communicator for this number of ranks."""
    sizes = [int(np.prod(shape)) for _, shape in reversed(resnet50.shapes())]
    ends = np.cumsum(sizes)[:-1]
    gradients = [np.split(heavy_tailed(sum(sizes), rank), ends) for rank in range(ranks)]
    allgather = Job(dr.Allgather(), gradients)
    rows = []
    for scheme in (dr.Allgather(), *SCHEMES):
        job = Job(scheme, gradients)
        for _ in range(_WARM_UP):
            allgather.step(), job.step()
        clock, pairs = Clock(), []
        for _ in range(steps):
            unit = allgather.step()
            with clock.running():
                pairs.append((job.step(), unit))
        rows.append(
            row(
                f"{scheme!r}, {ranks} ranks / Allgather",
                statistics.median(own / unit for own, unit in pairs),
                TARGETS.get((repr(scheme), ranks)),
                ranks=ranks,
                milliseconds=1e3 * statistics.median(own for own, _ in pairs),
                parts={
                    part: 1e3 * clock.seconds[part] / steps / ranks
                    for part in _PARTS
                    if part in clock.seconds
                },
            )
        )
        show(rows[-1])
    return rows


def show(entry):
    parts = "  ".join(f"{part} {ms:.1f}" for part, ms in entry["parts"].items())
    print(
        f"{entry['what']:<52}{entry['value']:>6.2f}{entry['milliseconds']:>8.1f} ms "
        f" {parts}{verdict(entry)}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, comma-separated")
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.ranks.split(",")]
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [entry for entry in kept if entry["ranks"] not in counts]
    for ranks in counts:
        rows += measure(ranks, arguments.steps)
    write(RESULTS, sorted(rows, key=lambda entry: entry["ranks"]))


if __name__ == "__main__":
    main()
