"""Next-character prediction on the source of Python's own library, for any network."""

import functools
import math
import pathlib
import sysconfig

import numpy as np
import torch

from .base import Task


@functools.cache
def _library_sources():
    """Return the characters of the alphabet, and the codes of the training and the test text."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    train = "".join(text for number, text in enumerate(texts) if number % 10)
    test = "".join(text for number, text in enumerate(texts) if not number % 10)
    characters = sorted(set(train))[:127]
    table = np.zeros(0x110000, dtype=np.int64)  # 0: a character outside the alphabet
    table[[ord(character) for character in characters]] = range(1, len(characters) + 1)
    return characters, _codes(train, table), _codes(test, table)


def _codes(text, table):
    return torch.from_numpy(table[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")])


class LanguageModel(Task):
    """A model of (n, length) character codes that returns (n, length, symbols) logits.

    The metric is bits per character on held-out files.

    Attributes:
        context: number of characters that a prediction can use.
    """

    metric = "bits per character"
    larger_is_better = False
    margin = 0.02
    context = 64

    def __init__(self):
        characters, self._train, test = _library_sources()
        self.symbols = len(characters) + 1
        self._test = test[: 400 * (self.context + 1)]

    def batches(self, size, seed):
        draw = np.random.default_rng(seed)
        length = self.context + 1
        for _ in range(self.total_steps):
            starts = draw.integers(len(self._train) - length, size=(size, self.batch // size))
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
