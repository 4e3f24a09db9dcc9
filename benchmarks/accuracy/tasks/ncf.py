"""Neural collaborative filtering on MovieLens-100k, with Adam and with Adagrad."""

import functools

import numpy as np
import recommender
import torch
from datasets import movielens_100k

from .base import Task


@functools.cache
def _movielens():
    """Return train pairs, test pairs and the (users, items) array of whether a user rated an
    item.
    """
    users, items, _, timestamps = movielens_100k()
    train, test, item_count = recommender.split(users, items, timestamps)
    rated = np.zeros((int(users.max()), item_count), dtype=bool)
    rated[users - 1, items - 1] = True
    return train, test, rated


class Recommender(Task):
    """NeuMF (He et al., 2017), the model of examples/recommender.py, with dense gradients.

    The metric is the share of users whose latest item is among the 10 best of that item and 99
    random items that the user did not rate.

    Attributes:
        negatives: random items that a user did not rate, per item that the user rated.
    """

    name = "ncf"
    metric = "hit rate at 10"
    margin = 0.005
    batch = 256
    total_steps = 4000
    learning_rates = (0.002, 0.004, 0.008)
    negatives = 4

    def __init__(self):
        self._train, self._test, self._rated = _movielens()

    def model(self):
        with torch.random.fork_rng():  # the example's model sets its own seed
            model = recommender.make_model(*self._rated.shape)
        for layer in model.modules():
            if isinstance(layer, torch.nn.Embedding):
                layer.sparse = False
                torch.nn.init.normal_(layer.weight, std=0.05)
            elif isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
        return model

    def optimizer(self, model, learning_rate):
        return torch.optim.Adam(model.parameters(), lr=learning_rate)

    def batches(self, size, seed):
        draw = np.random.default_rng((seed, 1))
        for chosen in self.shuffled(len(self._train), size, seed):
            pairs = self._train[chosen]
            users = np.repeat(pairs[:, :1], 1 + self.negatives, axis=1)
            items = np.concatenate([pairs[:, 1:], self._unrated(users[:, 1:], draw)], axis=1)
            truth = np.zeros(items.shape, dtype=np.float32)
            truth[:, 0] = 1
            parts = [
                torch.from_numpy(part).split(len(chosen) // size) for part in (users, items, truth)
            ]
            yield [tuple(part.flatten() for part in own) for own in zip(*parts)]

    def _unrated(self, users, draw):
        """Return a random item for each entry of ``users`` that this user did not rate."""
        items = draw.integers(self._rated.shape[1], size=users.shape)
        while (wrong := self._rated[users, items]).any():
            items[wrong] = draw.integers(self._rated.shape[1], size=np.count_nonzero(wrong))
        return items

    def loss(self, model, batch):
        users, items, truth = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(model(users, items), truth)

    def evaluate(self, model):
        model.eval()
        rated = [np.flatnonzero(row) for row in self._rated]
        return recommender.hit_rate(model, self._test, rated, self._rated.shape[1])


class AdagradRecommender(Recommender):
    """The same model in four epochs with Adagrad and the batches of examples/recommender.py.

    With 2 ranks, each batch uses about half of the rows of the item tables.
    """

    name = "adagrad-ncf"
    batch = 512
    total_steps = 772
    learning_rates = (0.05, 0.1, 0.2)

    def optimizer(self, model, learning_rate):
        return torch.optim.Adagrad(model.parameters(), lr=learning_rate)
