"""The convolutional network and the training loop of the demo and the benchmarks."""

import time

import horovod.torch as hvd
import numpy as np
import torch
from datasets import fashion_mnist

import deepreduce_hvd as dr

BATCH = 64  # images per rank and step


class Network(torch.nn.Module):
    """Two convolutional and two linear layers with 409,034 parameters."""

    def __init__(self):
        super().__init__()
        self.convolution1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.convolution2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = torch.nn.Linear(32 * 7 * 7, 256)
        self.output = torch.nn.Linear(256, 10)

    def forward(self, images):
        features = torch.nn.functional.max_pool2d(torch.relu(self.convolution1(images)), 2)
        features = torch.nn.functional.max_pool2d(torch.relu(self.convolution2(features)), 2)
        return self.output(torch.relu(self.hidden(features.flatten(1))))


def load():
    """Return the data set as tensors, with images scaled to mean 0 and standard deviation 1.

    Returns:
        Train images, train labels, test images, test labels.
    """
    train_images, train_labels, test_images, test_labels = fashion_mnist()

    def scaled(images):
        return (torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.286) / 0.353

    def labels(values):
        return torch.from_numpy(values).long()

    return scaled(train_images), labels(train_labels), scaled(test_images), labels(test_labels)


def accuracy(network, images, labels):
    """Return the accuracy on the test images; each rank evaluates a part of them."""
    network.eval()
    own = slice(hvd.rank(), None, hvd.size())
    right = 0
    with torch.no_grad():
        for part, truth in zip(images[own].split(500), labels[own].split(500)):
            right += int((network(part).argmax(1) == truth).sum())
    network.train()
    return float(hvd.allreduce(torch.tensor(float(right)), op=hvd.Sum, name="right")) / len(images)


def dense_bytes(network):
    """Return the bytes that a rank hands to allreduce per step without compression."""
    return 4 * sum(parameter.numel() for parameter in network.parameters())


def train(data, compression, epochs, seed, on_progress, learning_rate=0.05):
    """Train a new network; calls with the same seed use the same images in the same order.

    Args:
        data: what :func:`load` returns.
        compression: None, or a function of the network that returns the ``compression`` argument of
            DistributedOptimizer.
        epochs: number of epochs.
        seed: seed of the network's weights and of the order of images.
        on_progress: function of (steps done, total steps, loss), called every 50 steps.
        learning_rate: maximum of the one-cycle schedule.

    Returns:
        The network, the median seconds per step, the test accuracy.
    """
    train_images, train_labels, test_images, test_labels = data
    torch.manual_seed(seed)
    network = Network()
    chosen = hvd.Compression.none if compression is None else compression(network)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-4
    )
    if isinstance(chosen, dr.Compressor):
        optimizer = dr.prepare(optimizer, chosen)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=network.named_parameters(), compression=chosen
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    order = np.random.default_rng(seed)
    steps = len(train_images) // (BATCH * hvd.size())
    total = epochs * steps
    decay = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=total, pct_start=0.1
    )
    seconds = []
    done = 0
    for epoch in range(epochs):
        shuffled = torch.from_numpy(order.permutation(len(train_images)))
        for step in range(steps):
            first = (step * hvd.size() + hvd.rank()) * BATCH
            batch = shuffled[first : first + BATCH]
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                network(train_images[batch]), train_labels[batch]
            )
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
            decay.step()
            done += 1
            if done % 50 == 0 or done == total:
                on_progress(done, total, loss.item())
    return network, float(np.median(seconds)), accuracy(network, test_images, test_labels)
