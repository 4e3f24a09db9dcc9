"""One rank of benchmarks/auto_schedule.py, with Horovod or with PyTorch's DDP.

Arguments: the framework, the number of turns of each row, and the features of the network's first
linear layer.
"""

import itertools
import sys
import time

import torch
from auto_schedule_rows import AUTO, DDP, FRAMEWORKS, print_rows
from decisions import decide, scheduler_of
from time_to_accuracy_worker import load, vgg
from turns import seconds_in_turns

import deepreduce_hvd as dr

_CODEC = dr.Codec(dr.TopK(0.01), index=dr.Rice(), value=dr.LloydMax(bits=1))
_OPTIONS = {
    "default": {"codec": None},
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
    options = {"codec": _CODEC} | _OPTIONS.get(row, {})
    return dr.Compressor(parameters=network.named_parameters(), **options)


def main(framework, turns, features):
    job = {"Horovod": HorovodJob, "DDP": DdpJob}[framework]()
    images, labels, _, _ = load()
    trained = {}
    for row in FRAMEWORKS[framework].rows:
        torch.manual_seed(0)
        network = vgg(features)
        trained[row] = job.train(row, network, torch.optim.SGD(network.parameters(), lr=0.01))
    batches = zip(itertools.cycle(images.split(32)), itertools.cycle(labels.split(32)))

    def step(row):
        model, optimizer, _ = trained[row]
        batch, classes = next(batches)
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), classes).backward()
        optimizer.step()
        return time.perf_counter() - started

    (auto,) = set(AUTO) & set(trained)
    compressor = trained[auto][2]
    before = decide(compressor, lambda _: step(auto))
    seconds = seconds_in_turns(trained, lambda row: job.slowest(step(row)), turns)
    if job.rank == 0:
        print_rows(seconds, before, compressor.adapter, scheduler_of(compressor))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
