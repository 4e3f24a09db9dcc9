"""The tasks of the accuracy laboratory: data, model, optimizer, schedule and metric."""

import math
import pathlib
import sys
import sysconfig

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "examples"))


class Task:
    """What all tasks share.

    Attributes:
        metric: name of the metric.
        larger_is_better: whether a larger value is better.
        margin: difference that counts as equal.
        samples_per_rank: samples per rank and step.
        total_steps: number of steps with 4 ranks.
        learning_rates: candidates for the peak of the schedule.
        clip: norm to which the mean gradient is clipped, or None.
        warm_up: share of the steps in which the learning rate rises.
    """

    clip = None
    larger_is_better = True
    margin = 0.002
    samples_per_rank = 32
    total_steps = 1000
    warm_up = 0.05

    def steps(self, size):
        """Return the number of steps; the number of samples is the same for each ``size``."""
        return max(self.total_steps * 4 // size, 1)

    def rate(self, step, total):
        """Return the share of the peak learning rate in a step: linear warm-up, then cosine."""
        first = max(1, round(self.warm_up * total))
        if step < first:
            return (step + 1) / first
        return 0.5 * (1 + math.cos(math.pi * (step - first) / max(total - first, 1)))


class LanguageModel(Task):
    """Next-character prediction on the source of Python's own library, by a small transformer.

    The metric is bits per character on held-out files.
    """

    name = "transformer"
    metric = "bits per character"
    larger_is_better = False
    margin = 0.02
    context = 64
    samples_per_rank = 12
    total_steps = 500
    width, layers, heads = 96, 2, 4
    learning_rates = (0.004, 0.008)

    def __init__(self):
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
        train = "".join(text for number, text in enumerate(texts) if number % 10)
        test = "".join(text for number, text in enumerate(texts) if not number % 10)
        self.characters = sorted(set(train))[:127]
        table = {character: number + 1 for number, character in enumerate(self.characters)}
        self._train = self._codes(train, table)
        self._test = self._codes(test, table)[: 400 * (self.context + 1)]

    @staticmethod
    def _codes(text, table):
        return torch.tensor([table.get(character, 0) for character in text], dtype=torch.long)

    def model(self):
        return _Transformer(
            len(self.characters) + 1, self.context, self.width, self.layers, self.heads
        )

    def optimizer(self, model, learning_rate):
        return torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )

    def batches(self, size, seed):
        draw = np.random.default_rng(seed)
        length = self.context + 1
        for _ in range(self.steps(size)):
            starts = draw.integers(len(self._train) - length, size=(size, self.samples_per_rank))
            yield [
                torch.stack([self._train[start : start + length] for start in own])
                for own in starts
            ]

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model):
        model.eval()
        with torch.no_grad():
            rows = self._test.view(-1, self.context + 1)
            losses = [float(self.loss(model, part)) * len(part) for part in rows.split(50)]
        return sum(losses) / len(rows) / math.log(2)


class _Transformer(torch.nn.Module):
    def __init__(self, symbols, context, width, layers, heads):
        super().__init__()
        self.embedding = torch.nn.Embedding(symbols, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.output = torch.nn.Linear(width, symbols)
        self.register_buffer(
            "mask", torch.nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, tokens):
        state = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            state = block(state, src_mask=self.mask, is_causal=True)
        return self.output(self.norm(state))


class ResidualNetwork(Task):
    """Fashion-MNIST by a residual network with batch normalization, SGD with momentum 0.9."""

    name = "resnet"
    metric = "test accuracy"
    samples_per_rank = 32
    total_steps = 600
    learning_rates = (0.1, 0.2)

    def __init__(self):
        from datasets import fashion_mnist

        images, labels, test_images, test_labels = fashion_mnist()
        self._images, self._labels = self._scaled(images), torch.from_numpy(labels).long()
        self._test = self._scaled(test_images), torch.from_numpy(test_labels).long()

    @staticmethod
    def _scaled(images):
        return (torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.286) / 0.353

    def model(self):
        return _ResNet()

    def optimizer(self, model, learning_rate):
        return torch.optim.SGD(
            model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4
        )

    def batches(self, size, seed):
        draw = np.random.default_rng(seed)
        order = np.zeros(0, dtype=np.int64)
        need = size * self.samples_per_rank
        for _ in range(self.steps(size)):
            if len(order) < need:
                order = draw.permutation(len(self._images))
            chosen, order = torch.from_numpy(order[:need]), order[need:]
            yield [
                (self._images[own], self._labels[own])
                for own in chosen.split(self.samples_per_rank)
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


TASKS = {kind.name: kind for kind in (LanguageModel, ResidualNetwork)}
