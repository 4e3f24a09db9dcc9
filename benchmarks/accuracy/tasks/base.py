"""What all tasks share."""

import math

import numpy as np


class Task:
    """A data set, a model and its training.

    Attributes:
        name: name on the command line and in tables.
        metric: name of the metric.
        larger_is_better: whether a larger value is better.
        margin: difference that counts as equal.
        batch: samples per step, which the ranks share.
        total_steps: number of steps.
        learning_rates: candidates for the peak of the schedule.
        clip: norm to which the mean gradient is clipped, or None.
        warm_up: share of the steps in which the learning rate rises.
    """

    clip = None
    larger_is_better = True
    margin = 0.002
    batch = 128
    total_steps = 1000
    warm_up = 0.05

    def rate(self, step, total):
        """Return the share of the peak learning rate in a step: linear warm-up, then cosine."""
        first = max(1, round(self.warm_up * total))
        if step < first:
            return (step + 1) / first
        return 0.5 * (1 + math.cos(math.pi * (step - first) / max(total - first, 1)))

    def shuffled(self, count, size, seed):
        """Yield the samples of each step: epochs of a new random order each.

        Args:
            count: number of samples in the training data.
            size: number of ranks.
            seed: seed of the order.

        Yields:
            (size * (batch // size),) int64 array of sample numbers, an equal part for each rank.
            Samples at the end of an epoch that do not fill a step are dropped.
        """
        draw = np.random.default_rng(seed)
        order = np.zeros(0, dtype=np.int64)
        need = size * (self.batch // size)
        for _ in range(self.total_steps):
            if len(order) < need:
                order = draw.permutation(count)
            chosen, order = order[:need], order[need:]
            yield chosen
