"""A residual network with batch normalization, with SGD and momentum 0.9."""

import torch

from .images import ImageClassification


class ResidualNetwork(ImageClassification):
    """A small ResNet: a stem and three blocks of two convolutions."""

    name = "resnet"
    total_steps = 600
    learning_rates = (0.1, 0.2)

    def model(self):
        return _ResNet()


class _Block(torch.nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(outputs)
        self.second = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(outputs)
        self.short = (
            torch.nn.Identity()
            if inputs == outputs and stride == 1
            else torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, images):
        state = torch.relu(self.norm1(self.first(images)))
        return torch.relu(self.norm2(self.second(state)) + self.short(images))


class _ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 16, 3, 2, 1, bias=False)
        self.norm = torch.nn.BatchNorm2d(16)
        self.blocks = torch.nn.Sequential(_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
        self.output = torch.nn.Linear(64, 10)

    def forward(self, images):
        state = self.blocks(torch.relu(self.norm(self.stem(images))))
        return self.output(state.mean((2, 3)))
