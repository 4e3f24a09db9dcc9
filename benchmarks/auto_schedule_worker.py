"""One rank of benchmarks/auto_schedule.py, with Horovod or with PyTorch's DDP.

Arguments: the launcher and the number of measured steps per row.
"""

import json
import random
import statistics
import sys
import time

import torch
from auto_schedule_rows import AUTO, DDP, ROWS
from decisions import decide
from time_to_accuracy_worker import load, vgg

import deepreduce_hvd as dr

_CODEC = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
_OPTIONS = {
    "one message per gradient": {"bucket_bytes": 0},
    "auto": {"schedule": "auto"},
    f"{DDP}auto": {"schedule": "auto"},
}


class HorovodJob:
    """The ranks of a job of horovodrun."""

    def __init__(self):
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()
        self.rank = hvd.rank()

    def slowest(self, seconds):
        """Return the largest of all ranks' numbers."""
        return float(self._hvd.allreduce(torch.tensor(seconds), op=self._hvd.Max, name="seconds"))

    def train(self, row, network, optimizer):
        """Return the model and the optimizer of a row, and its compressor or None."""
        hvd, named, compressor = self._hvd, list(network.named_parameters()), None
        compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(row)
        if compression is None:
            compression = compressor = compressor_of(row, network)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        return network, optimizer, compressor


class DdpJob:
    """The ranks of a job of torchrun."""

    def __init__(self):
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def slowest(self, seconds):
        """Return the largest of all ranks' numbers."""
        largest = torch.tensor(seconds)
        self._dist.all_reduce(largest, self._dist.ReduceOp.MAX)
        return float(largest)

    def train(self, row, network, optimizer):
        """Return the model and the optimizer of a row, and its compressor or None."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if row == f"{DDP}none":
            return model, optimizer, None
        if row == f"{DDP}fp16":
            model.register_comm_hook(None, fp16_compress_hook)
            return model, optimizer, None
        compressor = compressor_of(row, network)
        compressor.register(model)
        return model, optimizer, compressor


def compressor_of(row, network):
    return dr.Compressor(_CODEC, parameters=network.named_parameters(), **_OPTIONS.get(row, {}))


def main(launcher, steps):
    job = {"horovodrun": HorovodJob, "torchrun": DdpJob}[launcher]()
    images, labels, _, _ = load()
    trained = {}
    for row in ROWS[launcher]:
        torch.manual_seed(0)
        network = vgg()
        trained[row] = job.train(row, network, torch.optim.SGD(network.parameters(), lr=0.01))

    def step(row, number):
        model, optimizer, _ = trained[row]
        batch = slice(32 * number, 32 * number + 32)
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        return time.perf_counter() - started

    (auto,) = set(AUTO) & set(ROWS[launcher])
    before = decide(trained[auto][2], lambda number: step(auto, number))
    seconds = {row: [] for row in trained}
    for number in range(steps + 2):
        # in another order each time, the same on all ranks: a row can slow down the next one
        for row in random.Random(number).sample(list(trained), len(trained)):
            # a step ends when the slowest rank has ended it
            slowest = job.slowest(step(row, number))
            if number >= 2:
                seconds[row].append(slowest)
    if job.rank:
        return
    for row, (_, _, compressor) in trained.items():
        adapter = compressor.adapter if row == auto else None
        print("ROW " + json.dumps({
            "row": row, "seconds": statistics.median(seconds[row]), "fastest": min(seconds[row]),
            "slowest": max(seconds[row]), "steps": steps,
            "steps_to_decide": before if adapter else None,
            "chosen": adapter.schedule_notes()[0] if adapter else "",
            "trials": [
                {"rule": trial.rule, "predicted": trial.predicted, "measured": trial.measured}
                for trial in (adapter.scheduler.trials if adapter else [])
            ],
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
