"""What ranks have in common, and how much of their sum a communicator sends.

    PYTHONPATH=examples nice python benchmarks/accuracy/agreement.py

Trains tasks of the laboratory on simulated ranks and looks at every 25th step after the warm-up.
Writes results/accuracy-agreement.json. Takes about 7 minutes.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import training
from candidates import CANDIDATES
from tasks import TASKS
from virtual_ranks import VirtualRanks

RESULTS = pathlib.Path(__file__).resolve().parent.parent.parent / "results"
_EVERY, _FIRST = 25, 75
#: (task, candidate, ranks, batch factor, learning rate, steps)
RUNS = (
    ("transformer", "1 % in total, of the sum", 16, 1, 0.008, 300),
    ("transformer", "1 % in total, of all selections", 16, 1, 0.008, 300),
    ("resnet", "raw values", 16, 1, 0.2, 150),
    ("resnet", "GTopK, raw values", 16, 1, 0.2, 150),
    ("resnet", "GTopK", 16, 1, 0.2, 150),
    ("resnet", "CLTK, TopK", 16, 1, 0.2, 150),
    ("resnet", "CLTK, TopK", 8, 1, 0.2, 150),
    ("resnet", "CLTK, TopK", 8, 8, 0.2, 150),
    ("resnet", "CLTK, TopK, LowPass", 8, 8, 0.2, 150),
    ("resnet", "raw values", 8, 8, 0.2, 150),
)


class _EnoughError(Exception):
    """Ends a training early."""


class WatchedRanks(VirtualRanks):
    """Virtual ranks that append the figures of some steps to ``samples``."""

    def __init__(self, samples, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._samples = samples

    def _exchange(self, gradients):
        if self.steps < _FIRST or self.steps % _EVERY:
            return super()._exchange(gradients)
        own = np.stack([self._joined(part) for part in gradients])
        kept = np.stack([self._joined(state, 0) for state in self._states])
        (part,) = self._parts()  # one codec and one memory
        selected = [bucket.choose().indices for bucket in self._buckets(gradients, *part)]
        result = super()._exchange(gradients)
        self._samples.append(figures(own, kept, selected, self._joined(result)))
        return result

    def _joined(self, tensors, part=None):
        """Return the compressed tensors in a row; with ``part``, that array of each tuple."""
        return np.concatenate(
            [tensors[name] if part is None else tensors[name][part] for name in self.compressed]
        )


def figures(gradients, residuals, selected, sent):
    """Return the figures of one step.

    Args:
        gradients, residuals: (P, d) of all ranks, before the exchange.
        selected: the indices that each rank selects.
        sent: (d,) the mean that the ranks receive.

    Returns:
        Dictionary of:

        - share_sent: share of the elements that the ranks receive.
        - energy_sent: share of the energy of the mean of gradients and residuals that ``sent`` has.
        - residual_to_gradient: norm of the mean residual over the norm of the mean gradient.
        - steps_in_residual: sum of the magnitudes in the mean residual over that in ``sent``.
        - cosine: mean cosine between the gradients of two ranks.
        - cosine_with_residual: the same with the residual added to each gradient.
        - ranks_that_select: number of ranks that select an element, the mean over all elements that
          a rank selects.
    """
    total = (gradients + residuals).mean(axis=0)
    counts = np.bincount(np.concatenate(selected), minlength=total.size)
    left = residuals.mean(axis=0)
    return {
        "share_sent": np.count_nonzero(sent) / sent.size,
        "energy_sent": 1 - np.sum((total - sent) ** 2) / np.sum(total**2),
        "residual_to_gradient": np.linalg.norm(left) / np.linalg.norm(gradients.mean(axis=0)),
        "steps_in_residual": np.abs(left).sum() / np.abs(sent).sum(),
        "cosine": _cosine(gradients),
        "cosine_with_residual": _cosine(gradients + residuals),
        "ranks_that_select": counts[counts > 0].mean(),
    }


def _cosine(rows):
    """Return the mean cosine between two rows of a (P, d) array."""
    directions, size = rows / np.linalg.norm(rows, axis=1, keepdims=True), len(rows)
    return (np.sum(directions @ directions.T) - size) / (size * (size - 1))


def watch(task, candidate, ranks, rate, steps):
    """Train for some steps and return the means of the figures, with four significant digits.

    Args:
        task: one of :mod:`tasks`. Its schedule is that of the whole training.
        candidate: one of :mod:`candidates`.
        ranks: number of ranks.
        rate: peak learning rate.
        steps: number of the last step to look at.
    """
    samples = []

    def stop(done, total, loss):
        if done > steps:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        training.train(
            task, candidate, ranks, 0, rate, stop, functools.partial(WatchedRanks, samples)
        )
    means = {name: np.mean([one[name] for one in samples]) for name in samples[0]}
    return {name: float(f"{mean:.4g}") for name, mean in means.items()}


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, candidate, ranks, factor, rate, steps in RUNS:
        task = TASKS[name]()
        task.batch *= factor
        found = watch(task, CANDIDATES[candidate], ranks, rate, steps)
        rows.append({
            "task": name, "candidate": candidate, "ranks": ranks, "samples": task.batch // ranks,
            "learning_rate": rate, "first_step": _FIRST, "last_step": steps, **found,
        })  # fmt: skip
        shown = ", ".join(f"{name} {value}" for name, value in found.items())
        print(f"{name}, {candidate}, {ranks} ranks: {shown}", flush=True)
    (RESULTS / "accuracy-agreement.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
