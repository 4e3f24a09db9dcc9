"""Test threads that encode gradients during backward, on stock Horovod with PyTorch.

Started by test_torch_threads.py under horovodrun.
"""

import json
import random
import sys
import threading
import time

import horovod.torch as hvd
import torch
from torch_tools import ALL_COMPRESSED, assert_equal_everywhere, run_all

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import encoding_threads
from deepreduce_hvd.stages import memories, sparsifiers
from deepreduce_hvd.torch import host

encoding_threads.FEWEST_ELEMENTS = 1000
CODECS = (
    dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1)),
    dr.Codec(sparsifiers.RandomK(0.1), index=dr.EliasFano(), value=dr.QSGD(4)),
    dr.Codec(dr.TopK(0.02, warmup_steps=3), value=dr.FitPoly()),
)


class Network(torch.nn.Module):
    """A network with weights of many sizes.

    Some are not used in every step, and one is frozen later.
    """

    def __init__(self, sizes):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, factors):
        used = [one for one in zip(self.weights, factors) if one[1] is not None]
        return sum((weight * factor).sum() for weight, factor in used)


class Slowly:
    """Delays each encoding by a random time, and records the names of the encoding threads."""

    def __init__(self):
        self.threads = set()

    def __enter__(self):
        self._encode = encoding_threads._encode

        def encode(member, bucket):
            time.sleep(random.random() * 4e-3)  # Python's own generator: another order on each rank
            self.threads.add(threading.current_thread().name)
            return self._encode(member, bucket)

        encoding_threads._encode = encode
        return self

    def __exit__(self, *_):
        encoding_threads._encode = self._encode


def trained(seed, threads, steps=7):
    """Train a random network; return its weights, memories of all steps and the compressor."""
    draw = random.Random(seed)
    network = Network([draw.choice((10, 500, 1200, 5000, 20_000)) for _ in range(12)])
    memory = draw.choice((dr.Residual(), memories.MomentumCorrection(0.9), memories.NoMemory()))
    scaled = draw.random() < 0.5
    compressor = dr.Compressor(
        draw.choice(CODECS),
        memory,
        parameters=network.named_parameters(),
        bucket_bytes=draw.choice((0, 20_000, 100_000, 1 << 26)),
        **ALL_COMPRESSED,
        loss_scale=(lambda: 2.0) if scaled else None,
        threads=threads,
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )
    seen = []
    for step in range(steps):
        own = torch.Generator().manual_seed(1000 * seed + 10 * step + hvd.rank())
        factors = [torch.randn(weight.shape, generator=own) for weight in network.weights]
        if scaled and step == 3:
            factors[draw.randrange(12)][0] = torch.inf  # this step is void
        unused = {draw.randrange(12) for _ in range(draw.choice((0, 0, 3)))}
        network(
            [None if number in unused else one for number, one in enumerate(factors)]
        ).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            if not (scaled and step == 3):
                optimizer.step()
        optimizer.zero_grad()
        state = compressor.state_dict()  # in the middle of training
        seen += [
            part.clone() for one in state["parameters"].values() for part in one["memory"].values()
        ]
        if step == 4:
            compressor.load_state_dict(state)
        if step == 5:
            network.weights[draw.randrange(12)].requires_grad_(False)
    return [*network.weights], seen, compressor


def events_of(trace):
    return json.loads(trace.read_text())["traceEvents"]


def scenario_threads_change_nothing(directory):
    """Weights and memories of every step equal those without threads, bit for bit."""
    used, drawn = set(), set()
    for seed in range(10):
        weights, seen, _ = trained(seed, 0)
        with Slowly() as slowly:
            # each rank has another number of threads
            others, seen_others, compressor = trained(seed, 1 + (seed + hvd.rank()) % 3)
        used |= slowly.threads
        assert_equal_everywhere([(str(n), one) for n, one in enumerate(others)], f"seed {seed}")
        for own, other in zip([*weights, *seen], [*others, *seen_others], strict=True):
            assert torch.equal(own, other), (seed, own.shape)
        compressed = [row for row in compressor.stats().values() if row["path"] == "compressed"]
        assert not compressed or all(row["encode_seconds"] > 0 for row in compressed)
        trace = directory / f"threads.{hvd.size()}.{hvd.rank()}.json"
        compressor.timeline(trace)
        drawn.update(event["args"].get("name") for event in events_of(trace) if "args" in event)
    assert "encoding threads" in drawn, drawn
    assert used and all(name.startswith("deepreduce-encoder") for name in used), used


def scenario_an_error_in_a_thread_ends_the_step_on_every_rank(directory):
    """The other ranks get an error, and nothing hangs."""
    network = Network([5000] * 6)
    compressor = dr.Compressor(CODECS[0], parameters=network.named_parameters(), threads=2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=network.named_parameters(),
        compression=compressor,
    )
    works, encode_flat = [], host.encode_flat

    def fails(*arguments):
        if threading.current_thread() is not threading.main_thread():
            works.append(1)
            raise MemoryError("no room for a payload")
        return encode_flat(*arguments)

    if hvd.rank() == hvd.size() - 1:
        host.encode_flat = fails
    try:
        network([torch.ones(5000)] * 6).backward()
        optimizer.step()
    except dr.PeerFailedError as error:
        assert "no room for a payload" in str(error), error
    else:
        raise AssertionError("expected PeerFailedError, got a step")
    finally:
        host.encode_flat = encode_flat
    assert works or hvd.rank() < hvd.size() - 1


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_all(dict(globals()), sys.argv[1])
