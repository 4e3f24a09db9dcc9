"""One rank per host. The first argument selects the task.

Started by test_hosts.py with horovodrun over ssh.
"""

import json
import os
import pathlib
import signal
import sys

import horovod.torch as hvd
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import links  # noqa: E402

import deepreduce_hvd as dr  # noqa: E402
from deepreduce_hvd.communicators.wire import PROBE_BYTES  # noqa: E402

STEPS = 6
CODECS = {
    # the same number of messages with almost no contents, to measure the cost of the protocols
    "nothing": dr.Codec(dr.Threshold(1e30)),
    "recommended": None,
    "pairs": dr.Codec(dr.TopK(0.05)),
}
#: Headers of Ethernet, IP and TCP with time stamps, per segment. The counters count segments that
#: the kernel has joined as one.
HEADER_BYTES = 14 + 20 + 32


def network():
    """Return a network with 4 million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(500, 2000),
        torch.nn.Tanh(),
        torch.nn.Linear(2000, 1500),
        torch.nn.Tanh(),
        torch.nn.Linear(1500, 10),
    )


def training(codec):
    """Return (step function, compressor, network).

    The gradients differ between ranks.
    """
    layers = network()
    named = list(layers.named_parameters())
    compressor = dr.Compressor(codec, parameters=named)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.05),
        named_parameters=named,
        compression=compressor,
    )
    random = torch.Generator().manual_seed(1 + hvd.rank())

    def step():
        optimizer.zero_grad()
        layers(torch.randn(16, 500, generator=random)).pow(2).mean().backward()
        optimizer.step()

    return step, compressor, layers


def assert_bit_identical(layers):
    own = torch.cat([parameter.detach().view(-1) for parameter in layers.parameters()]).view(
        torch.int32
    )
    for rank, other in enumerate(hvd.allgather(own.view(1, -1), name="replicas")):
        assert torch.equal(other, own), f"replicas: rank {rank} differs from rank {hvd.rank()}"


def bytes_of(step, barrier):
    """Return the bytes that the interface of this host sent in a step, without headers."""
    barrier()
    before = links.interface_counters()
    step()
    barrier()  # now all messages have arrived on all hosts
    after = links.interface_counters()
    return (
        after["sent_bytes"]
        - before["sent_bytes"]
        - HEADER_BYTES * (after["sent_packets"] - before["sent_packets"])
    )


def expected_on_the_wire(stats):
    """Return the expected traffic of all hosts together, from the statistics of a rank.

    Gathers send to P - 1 other ranks, and allreduces are rings.
    """
    gathered = sum(
        row["sent_bytes"] - PROBE_BYTES for row in stats.values() if row["path"] == "compressed"
    )
    reduced = sum(
        row["sent_bytes"] if row["path"] == "dense" else PROBE_BYTES for row in stats.values()
    )
    return (hvd.size() - 1) * (gathered + 2 * reduced / hvd.size())


def train(directory):
    """Train with several codecs; write the counters of the interface and the bytes of stats()."""
    report = {"host": os.uname().nodename}
    for name, codec in CODECS.items():
        step, compressor, layers = training(codec)
        start = layers[0].weight.detach().clone()
        step()
        sent, expected = [], []
        for _ in range(STEPS):
            sent.append(bytes_of(step, hvd.barrier))
            expected.append(expected_on_the_wire(compressor.stats()))
        assert_bit_identical(layers)
        assert torch.equal(start, layers[0].weight) == (name == "nothing"), (
            f"{name}: expected training to move the weights"
        )
        report[name] = {"sent": sent, "expected": expected}
    (pathlib.Path(directory) / f"report.{hvd.rank()}.json").write_text(json.dumps(report))


def killed_in_a_step(directory):
    """The last rank kills itself in its third step, between the messages of two gradients."""
    step, compressor, _ = training(None)
    steps, calls, session = 0, 0, compressor.adapter
    compress = session.compress

    def compress_or_die(tensor):
        nonlocal calls
        if hvd.rank() == hvd.size() - 1 and steps == 2 and calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += steps == 2
        return compress(tensor)

    session.compress = compress_or_die
    for steps in range(1000):
        step()


def train_on(directory):
    """Train until something ends the process; tell the test when training has started."""
    step, _, _ = training(None)
    for number in range(100000):
        step()
        if number == 3:
            (pathlib.Path(directory) / f"training.{hvd.rank()}").touch()


def main(what, directory):
    hvd.init()
    if what != "train":
        # a host whose interface is down cannot report to horovodrun
        said = os.open(
            pathlib.Path(directory) / f"said.{hvd.rank()}", os.O_WRONLY | os.O_CREAT, 0o644
        )
        os.dup2(said, sys.stderr.fileno())
        (pathlib.Path(directory) / f"process.{hvd.rank()}").write_text(str(os.getpid()))
    globals()[what](directory)
    print("ended as it should")


if __name__ == "__main__":
    main(*sys.argv[1:])
