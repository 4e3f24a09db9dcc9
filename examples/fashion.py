"""The convolutional network and the training loop of the demos and the benchmarks."""

import time

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


class Training:
    """Training on the ranks of a job; subclasses say how these communicate.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
    """

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size

    load = staticmethod(load)

    def baseline(self, name):
        """Return the compression of a row without DeepReduce."""
        raise NotImplementedError

    def distribute(self, network, optimizer, compression):
        """Return the model and the optimizer that average gradients over all ranks."""
        raise NotImplementedError

    def mean(self, number):
        """Return the mean of a number over all ranks."""
        raise NotImplementedError

    @staticmethod
    def parameters(network):
        """Return the ``parameters`` of a compressor."""
        return network.named_parameters()

    @staticmethod
    def dense_bytes(network):
        """Return the bytes that a rank hands to allreduce per step without compression."""
        return 4 * sum(parameter.numel() for parameter in network.parameters())

    def accuracy(self, network, images, labels):
        """Return the accuracy on the test images; each rank evaluates a part of them."""
        network.eval()
        own = slice(self.rank, None, self.size)
        right = 0
        with torch.no_grad():
            for part, truth in zip(images[own].split(500), labels[own].split(500)):
                right += int((network(part).argmax(1) == truth).sum())
        network.train()
        return self.mean(right) * self.size / len(images)

    def train(self, data, compression, epochs, seed, on_progress, learning_rate=0.05):
        """Train a new network; calls with the same seed use the same images in the same order.

        Args:
            data: what :func:`load` returns.
            compression: function of the network that returns what :meth:`distribute` takes.
            epochs: number of epochs, also a fraction.
            seed: seed of the network's weights and of the order of images.
            on_progress: function of (steps done, total steps, loss), called every 50 steps.
            learning_rate: maximum of the one-cycle schedule.

        Returns:
            The network, the median seconds per step, the test accuracy.
        """
        train_images, train_labels, test_images, test_labels = data
        torch.manual_seed(seed)
        network = Network()
        chosen = compression(network)
        optimizer = torch.optim.SGD(
            network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-4
        )
        if isinstance(chosen, dr.Compressor):
            optimizer = dr.prepare(optimizer, chosen)
        model, optimizer = self.distribute(network, optimizer, chosen)
        order = np.random.default_rng(seed)
        steps = len(train_images) // (BATCH * self.size)
        total = max(round(epochs * steps), 1)
        decay = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, learning_rate, total_steps=total, pct_start=0.1
        )
        seconds = []
        for done in range(total):
            if done % steps == 0:
                shuffled = torch.from_numpy(order.permutation(len(train_images)))
            first = (done % steps * self.size + self.rank) * BATCH
            batch = shuffled[first : first + BATCH]
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(train_images[batch]), train_labels[batch]
            )
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
            decay.step()
            if (done + 1) % 50 == 0 or done + 1 == total:
                on_progress(done + 1, total, loss.item())
        return network, float(np.median(seconds)), self.accuracy(network, test_images, test_labels)
