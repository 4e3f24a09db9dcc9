"""One rank per host with PyTorch's DDP. The first argument selects the task.

Started by test_ddp_hosts.py with torchrun on every host.
"""

import datetime
import json
import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from worker import CODECS, STEPS, bytes_of, network

import deepreduce_hvd as dr


def training(codec):
    """Return (step function, compressor, network)."""
    layers = network()
    model = DistributedDataParallel(layers)
    compressor = dr.Compressor(codec, parameters=layers.named_parameters())
    compressor.register(model)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(1 + dist.get_rank())

    def step():
        optimizer.zero_grad()
        model(torch.randn(16, 500, generator=random)).pow(2).mean().backward()
        optimizer.step()

    return step, compressor, layers


def assert_bit_identical(layers):
    own = torch.cat([parameter.detach().view(-1) for parameter in layers.parameters()])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    for rank, other in enumerate(gathered):
        assert torch.equal(other, own), f"rank {rank} differs from rank {dist.get_rank()}"


def expected_on_the_wire(stats):
    """Return the expected traffic of all hosts together, from the statistics of a rank."""
    size = dist.get_world_size()
    ways = {"compressed": 0, "dense": 0}
    for row in stats.values():
        ways[row["path"]] += row["sent_bytes"]
    return (size - 1) * (ways["compressed"] + 2 * ways["dense"] / size)


def train(directory):
    """Train with several codecs; write the counters of the interface and the bytes of stats()."""
    report = {"host": os.uname().nodename}
    for name, codec in CODECS.items():
        step, compressor, layers = training(codec)
        start = layers[0].weight.detach().clone()
        step()
        sent, expected = [], []
        for _ in range(STEPS):
            sent.append(bytes_of(step, dist.barrier))
            expected.append(expected_on_the_wire(compressor.stats()))
        assert_bit_identical(layers)
        assert torch.equal(start, layers[0].weight) == (name == "nothing"), name
        report[name] = {"sent": sent, "expected": expected}
    (pathlib.Path(directory) / f"report.{dist.get_rank()}.json").write_text(json.dumps(report))


def killed_in_a_step(directory):
    """The last rank kills itself in its third step, before it encodes a bucket."""
    step, compressor, _ = training(None)
    steps, average = 0, compressor.adapter.average

    def average_or_die(bucket):
        if dist.get_rank() == dist.get_world_size() - 1 and steps == 2 and bucket.is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        return average(bucket)

    compressor.adapter.average = average_or_die
    for steps in range(1000):
        step()


def train_on(directory):
    """Train until something ends the process; tell the test when training has started."""
    step, _, _ = training(None)
    for number in range(100000):
        step()
        if number == 3:
            (pathlib.Path(directory) / f"training.{dist.get_rank()}").touch()


def main(what, directory):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
    if what != "train":
        (pathlib.Path(directory) / f"process.{dist.get_rank()}").write_text(str(os.getpid()))
    globals()[what](directory)
    print("ended as it should")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
