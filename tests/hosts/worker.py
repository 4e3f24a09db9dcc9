"""One rank on a host of its own; what it does is its first argument. Started by test_hosts.py under horovodrun over ssh."""

import json
import os
import pathlib
import signal
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import network  # noqa: E402

import deepreduce_hvd as dr  # noqa: E402

STEPS = 4
CODECS = {
    "nothing": dr.Codec(dr.Threshold(1e30)),  # as many messages with next to nothing in them: what the protocols cost
    "recommended": None,
    "pairs": dr.Codec(dr.TopK(0.05)),
}


def training(codec):
    """(a step, its compressor, the network) of a model whose gradients differ from rank to rank."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(500, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 10))
    named = list(layers.named_parameters())
    compressor = dr.Compressor(codec, parameters=named)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.05), named_parameters=named, compression=compressor)
    random = torch.Generator().manual_seed(1 + hvd.rank())

    def step():
        optimizer.zero_grad()
        layers(torch.randn(16, 500, generator=random)).pow(2).mean().backward()
        optimizer.step()

    return step, compressor, layers


def assert_bit_identical(layers):
    own = torch.cat([parameter.detach().view(-1) for parameter in layers.parameters()]).view(torch.int32)
    for rank, other in enumerate(hvd.allgather(own.view(1, -1), name="replicas")):
        assert torch.equal(other, own), f"replicas: rank {rank} differs from rank {hvd.rank()}"


def quiet_rate(seconds=1.0):
    """Bytes a second that Horovod's background threads send with nothing to do."""
    hvd.barrier()
    before = network.interface_counters()
    time.sleep(seconds)
    after = network.interface_counters()
    hvd.barrier()
    return (after["sent_bytes"] - before["sent_bytes"]) / seconds


def train(directory):
    """Trains with several codecs; writes what the interface counted beside what stats() claims."""
    report = {"host": os.uname().nodename, "quiet_rate": quiet_rate()}
    for name, codec in CODECS.items():
        step, compressor, layers = training(codec)
        start = layers[0].weight.detach().clone()
        step()
        hvd.barrier()
        before, started, claimed = network.interface_counters(), time.monotonic(), 0
        for _ in range(STEPS):
            step()
            claimed += sum(row["sent_bytes"] for row in compressor.stats().values())
        hvd.barrier()
        after, spent = network.interface_counters(), time.monotonic() - started
        assert_bit_identical(layers)
        assert torch.equal(start, layers[0].weight) == (name == "nothing"), f"{name}: expected training to move the weights"
        report[name] = {"claimed": claimed, "seconds": spent, **{figure: after[figure] - before[figure] for figure in after}}
    (pathlib.Path(directory) / f"report.{hvd.rank()}.json").write_text(json.dumps(report))


def killed_in_a_step(directory):
    """The last rank kills itself in its third step, after some gradients' messages and before the others'."""
    step, compressor, _ = training(None)
    steps, session = 0, compressor.session
    compress = session.compress

    def compress_or_die(tensor):
        if hvd.rank() == hvd.size() - 1 and steps == 2 and len(session._round) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return compress(tensor)

    session.compress = compress_or_die
    for steps in range(1000):
        step()


def train_on(directory):
    """Until something ends it; tells the test when it is in the middle of it."""
    step, _, _ = training(None)
    for number in range(100000):
        step()
        if number == 3:
            (pathlib.Path(directory) / f"training.{hvd.rank()}").touch()


def main(what, directory):
    hvd.init()
    ended = pathlib.Path(directory) / f"ended.{hvd.rank()}"
    try:
        globals()[what](directory)
    except BaseException as error:  # a host whose interface is down cannot say it to horovodrun
        ended.write_text(f"{type(error).__name__}: {error}")
        raise
    ended.write_text("as it should")


if __name__ == "__main__":
    main(*sys.argv[1:])
