"""Measure exchanges of ResNet-50's gradients on one rank of a job.

The gradients are prepared before, fixed by rank and step. They reach the optimizer's or DDP's hooks
through a real backward pass of operations that only return them, so no forward pass is measured.
"""

import gc
import itertools
import json
import statistics
import time

import numpy as np
import resnet50
import torch
from links import interface_counters

_DISTINCT_STEPS = 3  # number of steps with different gradients; they repeat
_FEWEST, _MOST = 4, 15


class _Prepared(torch.autograd.Function):
    """An operation on a parameter whose gradient is given."""

    @staticmethod
    def forward(context, parameter, gradient):
        context.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(context, _):
        return context.gradient, None


class Network(torch.nn.Module):
    """Parameters of ResNet-50's shapes; the input is their gradients.

    Attributes:
        named: list of (name, parameter).
    """

    def __init__(self):
        super().__init__()
        self.named = [
            (name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in resnet50.shapes()
        ]
        self.own = torch.nn.ParameterList(parameter for _, parameter in self.named)

    def forward(self, gradients):
        return torch.stack([_Prepared.apply(*pair) for pair in zip(self.own, gradients)]).sum()


class Exchange:
    """A step that only exchanges prepared gradients.

    Args:
        model: a :class:`Network`, or the DDP model of one.
        optimizer: optimizer of its parameters.
        claimed_bytes: function that returns the bytes that this rank reports to hand to collectives
            per step.
        warm_up: number of steps that do not count.
    """

    def __init__(self, model, optimizer, claimed_bytes, warm_up):
        self.claimed_bytes = claimed_bytes
        self.warm_up = warm_up
        self._model = model
        self._optimizer = optimizer

    def step(self, gradients):
        """Make a step; return the seconds that this rank took."""
        started = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(gradients).backward()
        self._optimizer.step()
        return time.perf_counter() - started


class Job:
    """The ranks of a job; subclasses say how they communicate.

    Attributes:
        rank: number of this rank.
    """

    rank: int

    def start_together(self):
        """Wait for all ranks without spinning."""
        raise NotImplementedError

    def broadcast(self, number):
        """Return the number that rank 0 has."""
        raise NotImplementedError

    def gather(self, entry):
        """Return the list of what each rank has."""
        raise NotImplementedError

    def exchange(self, name):
        """Return the :class:`Exchange` of a row."""
        raise NotImplementedError

    # --- measurements ---

    def run(self, names, seconds):
        """Measure rows; rank 0 prints each as a line of JSON after the word ROW."""
        torch.set_num_threads(1)
        gradients = self._prepared_gradients()
        for name in names:
            row = self._measure(name, gradients, seconds)
            gc.collect()
            if self.rank == 0:  # in one write, as other hosts may write to the same pipe
                print(f"ROW {json.dumps(row)}\n", end="", flush=True)

    def _prepared_gradients(self):
        """Return the gradients of all parameters for each of a few steps.

        They have log-normal magnitudes and random signs.
        """
        sizes = [int(np.prod(shape)) for _, shape in resnet50.shapes()]
        steps = []
        for step in range(_DISTINCT_STEPS):
            random = np.random.default_rng((self.rank, step))
            values = random.standard_normal(sum(sizes), dtype=np.float32)
            magnitudes = np.abs(values, out=np.empty_like(values))
            # separate draws for magnitude and sign, because the absolute value of a normal is not
            # log-normal
            np.exp(random.standard_normal(out=magnitudes, dtype=np.float32), out=magnitudes)
            flat = torch.from_numpy(np.copysign(1e-3 * magnitudes, values, dtype=np.float32))
            steps.append(
                [part.view(shape) for part, (_, shape) in zip(flat.split(sizes), resnet50.shapes())]
            )
        return steps

    def _measure(self, name, gradients, seconds):
        """Measure one row; return a dictionary that is the same on all ranks."""
        exchange = self.exchange(name)
        prepared = itertools.cycle(gradients)

        def step():
            own = next(prepared)
            self.start_together()
            return exchange.step(own)

        slow = [step() for _ in range(exchange.warm_up)][-1]
        repeats = self.broadcast(min(_MOST, max(_FEWEST, round(seconds / slow))))
        self.start_together()
        exchange.claimed_bytes()  # those of the steps that do not count
        before, started = interface_counters(), time.perf_counter()
        own = [step() for _ in range(repeats)]
        after, spent = interface_counters(), time.perf_counter() - started
        of_ranks = self.gather({
            "times": own, "wall_seconds": spent, "claimed": exchange.claimed_bytes(),
            **{figure: (after[figure] - before[figure]) / repeats for figure in after},
        })  # fmt: skip
        # a step ends when its last rank ends
        times = [max(rank["times"][step] for rank in of_ranks) for step in range(repeats)]
        row = {
            "name": name,
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "steps": repeats,
        }
        row["claimed_bytes"] = [round(rank["claimed"]) for rank in of_ranks]
        for figure in after:
            row[figure] = [round(rank[figure]) for rank in of_ranks]
        return row


def dense_bytes():
    """Return the bytes of all gradients."""
    return 4 * sum(int(np.prod(shape)) for _, shape in resnet50.shapes())


def optimizer_of(network):
    return torch.optim.SGD(network.parameters(), lr=1e-3)


def sent_bytes(compressor):
    """Return the bytes that a compressor reports for the last step."""
    return sum(row["sent_bytes"] for row in compressor.stats().values())
