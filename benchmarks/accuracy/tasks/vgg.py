"""A VGG-like network without batch normalization, with SGD and momentum 0.9."""

import itertools

import torch

from .images import ImageClassification


class VGG(ImageClassification):
    """Plain 3 × 3 convolutions, max pooling and three fully connected layers.

    As in VGG (Simonyan and Zisserman, 2015), most parameters are in the fully connected layers.
    There is no dropout.
    """

    name = "vgg"
    total_steps = 1500
    learning_rates = (0.025, 0.05, 0.1)

    def model(self):
        widths = 1, 16, 32, 64, 64
        layers = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            layers += [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.ReLU()]
            if number < 3:
                layers.append(torch.nn.MaxPool2d(2))
        layers += [
            torch.nn.Flatten(),
            torch.nn.Linear(64 * 3 * 3, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 10),
        ]  # fmt: skip
        for layer in layers:
            # without batch normalization, PyTorch's own initialization starts far too small
            if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
                torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                torch.nn.init.zeros_(layer.bias)
        return torch.nn.Sequential(*layers)
