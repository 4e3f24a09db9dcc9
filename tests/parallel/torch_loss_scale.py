"""Loss scaling with several passes per step under Horovod; run by torch_several.py.

Nothing may be lost: what the optimizers have applied, and the residuals, are the sum of all
gradients of the steps that the scaler did not skip.
"""

import random

import horovod.torch as hvd
import torch
from torch_gradients_tools import expect, named, residual

import deepreduce_hvd as dr

WIDTH = 24
CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.RawValue())


class Program:
    """A random program: a network of two parameters, their optimizers, and what every step does."""

    def __init__(self, seed):
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=draw.choice([1024.0, 2.0**16]), growth_interval=3
        )
        self.network = named(a=(WIDTH, WIDTH), b=(WIDTH, WIDTH))
        self.compressor = dr.Compressor(
            CODEC, parameters=self.network.items(), dense_below=0,
            bucket_bytes=draw.choice([0, 1 << 20]), loss_scale=self.scaler.get_scale,
        )  # fmt: skip
        self.passes = draw.choice([1, 1, 2])
        self.set_to_none, self.late = draw.random() < 0.7, draw.random() < 0.5
        groups = draw.choice([None, None, 1])
        self.optimizers = {
            names: hvd.DistributedOptimizer(
                torch.optim.SGD([self.network[name] for name in names], lr=1.0),
                named_parameters=[(name, self.network[name]) for name in names],
                compression=self.compressor,
                backward_passes_per_step=self.passes,
                groups=groups,
            )
            for names in draw.choice([["ab"], ["ab"], ["a"], ["a", "b"]])
        }
        self.begin = {name: one.detach().clone() for name, one in self.network.items()}
        self.expected = {
            name: torch.zeros(WIDTH, WIDTH) for names in self.optimizers for name in names
        }
        self.skipped = 0

    def zero_grad(self):
        for names, optimizer in self.optimizers.items():
            if self.set_to_none:
                optimizer.zero_grad()
            for name in names:
                if self.network[name].grad is not None:
                    self.network[name].grad.zero_()

    def step(self):
        draw = self.draw
        gradients = {name: torch.zeros(WIDTH, WIDTH) for name in self.network}
        void = set()
        if not self.late:
            self.zero_grad()
        count = draw.randint(1, 3)
        failing = draw.randrange(count) if draw.random() < 0.4 else None
        for number in range(count):
            for small in range(self.passes):
                fails = number == failing and small == 0
                self.backward(number + small == 0, fails, gradients, void)
            for optimizer in self.optimizers.values():
                optimizer.synchronize()
            if draw.random() < 0.2:
                self.compressor.state_dict()
        before = {name: one.detach().clone() for name, one in self.network.items()}
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                self.scaler.step(optimizer)
        self.scaler.update()
        for names in self.optimizers:
            skips = bool(void.intersection(names))
            self.skipped += skips
            moved = any(not torch.equal(before[name], self.network[name]) for name in names)
            expect(not (moved and skips), "seed", self.seed, names, "moved")
            for name in names if not skips else ():
                self.expected[name] += gradients[name]

    def backward(self, first, fails, gradients, void):
        """Run one backward pass; note its gradients, and the parameters whose gradients overflow.

        Args:
            first: whether it is the first one of the step.
            fails: whether it overflows.
        """
        draw = self.draw
        names = draw.choice(["a", "b", "ab", "ab"])
        infinite = draw.choice(["a", "b", "ab"])
        on_rank, number = draw.randrange(hvd.size()), draw.randrange(1 << 40)
        own = torch.randn(
            WIDTH, WIDTH, generator=torch.Generator().manual_seed(number + hvd.rank())
        )
        losses = {name: (self.network[name] * own).sum() for name in names}
        if self.late and first:  # between forward and backward
            self.zero_grad()
        if fails:
            void |= {name for name in infinite if name in losses}
            if hvd.rank() == on_rank:
                for name in void:
                    losses[name] = losses[name] * float("inf")
        self.scaler.scale(sum(losses.values())).backward()
        mean = hvd.allreduce(own, name="mean of all ranks")
        for name in names:
            gradients[name] += mean

    def check(self):
        saved = self.compressor.state_dict()["parameters"]
        for name, expected in self.expected.items():
            left = residual(self.compressor, name).view(WIDTH, WIDTH).contiguous()
            left = hvd.allreduce(left, name=f"residual.{name}") / saved[name]["loss_scale"]
            found = self.begin[name] - self.network[name].detach() + left
            difference = float((found - expected).abs().max())
            expect(difference < 1e-3, "seed", self.seed, name, "differs by", difference)


def scenario_skipped_steps_of_several_passes_lose_nothing(directory):
    skipped = 0
    for seed in range(20):
        program = Program(seed)
        for _ in range(10):
            program.step()
        program.check()
        program.compressor.close()
        skipped += program.skipped
    expect(skipped, "no step was skipped")


def scenario_gradients_that_the_program_sets_begin_a_new_step(directory):
    """Gradients that do not come from backward replace those of a skipped step."""
    network = named(a=(WIDTH, WIDTH))
    compressor = dr.Compressor(
        CODEC, parameters=network.items(), dense_below=0, loss_scale=lambda: 1.0
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=1.0),
        named_parameters=network.items(), compression=compressor,
    )  # fmt: skip
    draw, total = random.Random(1), torch.zeros(WIDTH, WIDTH)
    begin = network["a"].detach().clone()
    for step in range(20):
        void = draw.random() < 0.3
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        gradient = torch.randn(WIDTH, WIDTH, generator=generator)
        mean = hvd.allreduce(gradient, name="mean of all ranks")
        network["a"].grad = gradient * (float("inf") if void and hvd.rank() == 0 else 1.0)
        optimizer.synchronize()
        if not void:
            with optimizer.skip_synchronize():
                optimizer.step()
            total += mean
    left = residual(compressor, "a").view(WIDTH, WIDTH).contiguous()
    found = begin - network["a"].detach() + hvd.allreduce(left, name="residual")
    expect(torch.allclose(found, total, atol=1e-3), float((found - total).abs().max()))
