"""One rank of benchmarks/whole_step.py.

Arguments: the network, the number of turns of each row, and the number of examples of a batch.
"""

import collections
import contextlib
import json
import pathlib
import statistics
import sys
import threading
import time

import numpy as np
import torch
from auto_schedule_worker import HorovodJob
from decisions import decide
from measure import default_codec
from turns import seconds_in_turns
from whole_step_rows import DEFAULT, LOCAL, ROWS

import deepreduce_hvd as dr

_WORDS, _WIDTH, _TOKENS = 8192, 512, 64  # of the transformer
_REPEATS = 5


class Block(torch.nn.Module):
    """Two convolutions with a shortcut, as in ResNet-18 (He et al., 2016)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
            torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
        )
        self.shortcut = torch.nn.Sequential()
        if stride > 1:
            self.shortcut.append(torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(torch.nn.BatchNorm2d(outputs))

    def forward(self, images):
        return torch.relu(self.convolutions(images) + self.shortcut(images))


def resnet18():
    """ResNet-18 for images of 28 x 28 pixels and 10 classes: 11.2 million parameters."""
    parts = [torch.nn.Conv2d(1, 64, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    inputs = 64
    for number, outputs in enumerate((64, 128, 256, 512)):
        parts.append(Block(inputs, outputs, 1 if number == 0 else 2))
        parts.append(Block(outputs, outputs, 1))
        inputs = outputs
    parts += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*parts)


class Transformer(torch.nn.Module):
    """A language model of four layers that shares its embedding: 16.8 million parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(_WORDS, _WIDTH)
        # with PyTorch's own scale, backward computes with denormal numbers, and a step takes four
        # times as long
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        layer = torch.nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, words):
        hidden = self.layers(self.embedding(words))
        return (hidden @ self.embedding.weight.T).flatten(0, 1)


def batch_of(name, examples, draw):
    """Return inputs and classes for one step."""
    if name == "resnet18":
        return torch.randn(examples, 1, 28, 28, generator=draw), torch.randint(
            10, (examples,), generator=draw
        )
    words = torch.randint(_WORDS, (examples, _TOKENS + 1), generator=draw)
    return words[:, :-1], words[:, 1:].flatten()


def seconds_of_coding(network):
    """Return the seconds in which one thread encodes the last gradients and decodes two payloads.

    Gradients with fewer than 1,024 elements are left out, as by a ``Compressor`` with a codec.
    """
    codec = default_codec()
    gradients = [one.grad.numpy().ravel() for one in network.parameters() if one.numel() >= 1024]
    residuals = [np.zeros_like(gradient) for gradient in gradients]
    sums = [np.zeros_like(gradient) for gradient in gradients]
    spent = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for gradient, residual, out in zip(gradients, residuals, sums):
            payload = codec.encode(gradient, residual)
            dr.decode_sum([payload, payload], out)
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def processor_seconds():
    """Return {kind of thread: seconds of processor time so far} of this process.

    Threads that Python did not start count as Horovod's.
    """
    python = {one.native_id: one.name for one in threading.enumerate()}
    spent = collections.Counter()
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = python.get(int(task.name), "Horovod")
        kind = {"MainThread": "main", "Horovod": "Horovod"}.get(name, "compressor")
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            spent[kind] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def main(name, turns, examples):
    job = HorovodJob()
    make = {"resnet18": resnet18, "transformer": Transformer}[name]
    draw = torch.Generator().manual_seed(job.rank)
    trained = {}
    for row in ROWS:
        torch.manual_seed(0)
        network = make()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
        trained[row] = (
            (network, optimizer, None) if row == LOCAL else job.train(row, network, optimizer)
        )

    def step(row):
        model, optimizer, _ = trained[row]
        inputs, classes = batch_of(name, examples, draw)
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        return time.perf_counter() - started

    def slowest_step(row):
        earlier = processor_seconds()
        own = step(row)
        spent = processor_seconds()
        processor[row].update({kind: spent[kind] - earlier[kind] for kind in spent}, steps=1)
        return job.slowest(own)

    for _ in range(dr.recommended_codec().sparsifier.warmup_steps):
        step(DEFAULT)
    before = decide(trained["auto"][2], lambda _: step("auto"))
    processor = {row: collections.Counter() for row in ROWS}
    seconds = seconds_in_turns(ROWS, slowest_step, turns)
    coding = job.slowest(seconds_of_coding(trained[LOCAL][0]))
    if job.rank:
        return
    for row, spent in seconds.items():
        adapter = trained[row][2].adapter if row == "auto" else None
        print("ROW " + json.dumps({
            "row": row, "seconds": statistics.median(spent), "fastest": min(spent),
            "slowest": max(spent), "steps": len(spent), "coding": coding,
            "processor_seconds": {
                kind: processor[row][kind] / processor[row]["steps"]
                for kind in ("main", "compressor", "Horovod")
            },
            "parameters": sum(one.numel() for one in trained[row][0].parameters()),
            "steps_to_decide": before if adapter else None,
            "chosen": adapter.notes()[0] if adapter else "",
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
