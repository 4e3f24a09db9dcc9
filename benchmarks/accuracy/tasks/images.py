"""Image classification on Fashion-MNIST, for any network."""

import functools

import torch
from datasets import fashion_mnist

from .base import Task


@functools.cache
def _fashion_mnist():
    """Return train images, train labels, test images, test labels; images are (n, 1, 28, 28)."""
    images, labels, test_images, test_labels = fashion_mnist()
    return _scaled(images), _numbers(labels), _scaled(test_images), _numbers(test_labels)


def _scaled(images):
    return (torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.286) / 0.353


def _numbers(labels):
    return torch.from_numpy(labels).long()


class ImageClassification(Task):
    """Fashion-MNIST. The metric is the accuracy on the test images."""

    metric = "test accuracy"

    def __init__(self):
        self._images, self._labels, *self._test = _fashion_mnist()

    def optimizer(self, model, learning_rate):
        return torch.optim.SGD(
            model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4
        )

    def batches(self, size, seed):
        for chosen in self.shuffled(len(self._images), size, seed):
            yield [
                (self._images[own], self._labels[own])
                for own in torch.from_numpy(chosen).split(len(chosen) // size)
            ]

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model):
        model.eval()
        images, labels = self._test
        with torch.no_grad():
            right = sum(
                int((model(part).argmax(1) == truth).sum())
                for part, truth in zip(images.split(500), labels.split(500))
            )
        return right / len(images)
