"""One rank of benchmarks/time_to_accuracy.py: train a network on Fashion-MNIST.

The clock runs while the network is trained, and stands still while it is evaluated. The first rank
prints a point of the curve after each evaluation.
"""

import argparse
import json
import math
import time

import horovod.torch as hvd
import numpy as np
import torch
from folders import EXAMPLES, module_at
from links import interface_counters

import deepreduce_hvd as dr

RATIO = 0.01
IMAGES = 64  # per step, of all ranks together
MOMENTUM = 0.9
WARM_UP = 0.05  # share of the steps in which the learning rate rises

ROWS = {
    "none": lambda named: hvd.Compression.none,
    "fp16": lambda named: hvd.Compression.fp16,
    "Top-r pairs": lambda named: dr.Compressor(
        dr.Codec(dr.TopK(RATIO), index=dr.RawIndex(), value=dr.RawValue()), parameters=named
    ),
    "default": lambda named: dr.Compressor(parameters=named),
}


def vgg(features):
    """Return a network as VGG has it: convolutions, then large linear layers.

    Args:
        features: features of the first linear layer; with 2,048, it has 8.6 million parameters.
    """
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 7 * 7, features), torch.nn.ReLU(),
        torch.nn.Linear(features, features // 2), torch.nn.ReLU(),
        torch.nn.Linear(features // 2, 10),
    )  # fmt: skip


def load():
    """Return train images, train labels, test images and test labels as tensors."""
    images, labels, test_images, test_labels = module_at(EXAMPLES / "datasets.py").fashion_mnist()

    def scaled(images):
        return (torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.286) / 0.353

    return (
        scaled(images),
        torch.from_numpy(labels).long(),
        scaled(test_images),
        torch.from_numpy(test_labels).long(),
    )


def share_of_rate(step, total):
    """Return the share of the peak learning rate in a step: linear warm-up, then cosine."""
    first = max(1, round(WARM_UP * total))
    if step < first:
        return (step + 1) / first
    return 0.5 * (1 + math.cos(math.pi * (step - first) / max(total - first, 1)))


class Training:
    """The network, its optimizer and its data on this rank.

    Args:
        row: key of ``ROWS``.
        steps: number of steps of the learning rate's schedule.
        learning_rate: its maximum.
        seed: of the weights and of the order of images; the same order for each number of ranks.
        features: as for :func:`vgg`.
    """

    def __init__(self, row, steps, learning_rate, seed, features):
        self.images, self.labels, self.test_images, self.test_labels = load()
        torch.manual_seed(seed)
        self.network = vgg(features)
        named = list(self.network.named_parameters())
        compression = ROWS[row](named)
        optimizer = torch.optim.SGD(self.network.parameters(), lr=learning_rate, momentum=MOMENTUM)
        if isinstance(compression, dr.Compressor):
            optimizer = dr.prepare(optimizer, compression)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: share_of_rate(step, steps)
        )
        hvd.broadcast_parameters(self.network.state_dict(), root_rank=0)
        random = np.random.default_rng(seed)
        epochs = math.ceil(steps * IMAGES / len(self.images))
        order = np.concatenate([random.permutation(len(self.images)) for _ in range(epochs)])
        self.order = torch.from_numpy(order)
        self.done = 0

    def step(self):
        batch = self.order[self.done * IMAGES : (self.done + 1) * IMAGES][hvd.rank() :: hvd.size()]
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            self.network(self.images[batch]), self.labels[batch]
        )
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def accuracy(self):
        """Return the accuracy on the test images; each rank evaluates a part of them."""
        own = slice(hvd.rank(), None, hvd.size())
        right = 0
        with torch.no_grad():
            for part, truth in zip(
                self.test_images[own].split(250), self.test_labels[own].split(250)
            ):
                right += int((self.network(part).argmax(1) == truth).sum())
        right = hvd.allreduce(torch.tensor(float(right)), op=hvd.Sum, name="right")
        return float(right) / len(self.test_images)


def sent_bytes():
    """Return the bytes that the interface of this host has sent; 0 in a job of one rank."""
    return interface_counters()["sent_bytes"] if hvd.size() > 1 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", choices=list(ROWS))
    for name, kind in (("steps", int), ("every", int), ("limit", float), ("learning-rate", float), ("seed", int), ("features", int)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    training = Training(
        options.row, options.steps, options.learning_rate, options.seed, options.features
    )
    seconds = 0.0
    while training.done < options.steps and seconds < options.limit:
        count = min(options.every, options.steps - training.done)
        hvd.barrier()
        before, started = sent_bytes(), time.perf_counter()
        for _ in range(count):
            training.step()
        # a step ends when its last rank ends
        own = time.perf_counter() - started
        span = max(hvd.allgather_object(own))
        seconds += span
        sent = (sent_bytes() - before) / count
        point = {
            "step": training.done, "seconds": seconds, "accuracy": training.accuracy(),
            "seconds_per_step": span / count, "sent_bytes": sent,
        }  # fmt: skip
        if hvd.rank() == 0:
            print("ROW " + json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
