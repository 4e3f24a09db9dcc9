"""Loss scaling with several passes per step, in DDP and fully_shard; run by *_scenarios.py.

Nothing may be lost: what the optimizer has applied, and the residuals, are the sum of all gradients
of the steps that the scaler did not skip.
"""

import contextlib
import random

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr

WIDTH = 24
CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.RawValue())


class Heads(torch.nn.Module):
    """Two linear functions; a batch uses one or both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs, heads):
        return [getattr(self, head)(inputs) for head in heads]


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def ddp_model(draw, scaler):
    network = Heads()
    model = DistributedDataParallel(
        network, find_unused_parameters=True, gradient_as_bucket_view=draw.random() < 0.5
    )
    compressor = dr.Compressor(
        CODEC, parameters=network.named_parameters(), dense_below=0, loss_scale=scaler.get_scale
    )
    compressor.register(model)

    def without_exchange(exchanges):
        return contextlib.nullcontext() if exchanges else model.no_sync()

    def residual(name, saved):
        total = saved.view(WIDTH, WIDTH).clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return model, network, compressor, without_exchange, residual


def fsdp_model(mesh):
    def build(draw, scaler):
        network = Heads()
        for module in (network.a, network.b, network):
            fully_shard(module, mesh=mesh["ranks"])
        compressor = dr.Compressor(
            CODEC, parameters=network.named_parameters(), dense_below=0, loss_scale=scaler.get_scale
        )
        compressor.register(network, mesh["hosts"])

        def without_exchange(exchanges):
            network.set_requires_gradient_sync(exchanges)
            return contextlib.nullcontext()

        def residual(name, saved):
            own = saved.reshape(-1, WIDTH)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own.contiguous())
            ranks = mesh["ranks"].size()
            rows = [torch.cat(parts[i : i + ranks]) for i in range(0, len(parts), ranks)]
            return sum(rows) / len(rows)

        return network, network, compressor, without_exchange, residual

    return build


def _batch(draw):
    """Return inputs and targets of this rank."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 40) + dist.get_rank())
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(2)]


class Program:
    """A random program: which optimizers own the heads, and what every step does.

    A head without an optimizer is trained all the same, and nothing clears its gradient.
    """

    def __init__(self, seed, build):
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=draw.choice([1024.0, 2.0**16]), growth_interval=3
        )
        self.model, self.network, self.compressor, self.without_exchange, self.residual = build(
            draw, self.scaler
        )
        self.set_to_none, self.late = draw.random() < 0.7, draw.random() < 0.5
        # PyTorch's fused SGD takes no DTensor
        self.fused = draw.random() < 0.3 and not isinstance(self.weight("a"), DTensor)
        self.skipped = 0
        self.optimizers = {}  # the heads of each optimizer -> the optimizer
        #: head -> sum of the gradients in steps that were not skipped, for owned heads
        self.expected = {}
        self.begin = {name: _whole(one) for name, one in self.network.named_parameters()}

    def weight(self, head):
        return getattr(self.network, head).weight

    def total(self, head):
        """Return what was applied to a head, and its residual."""
        name = f"{head}.weight"
        saved = self.compressor.state_dict()["parameters"][name]
        # no loss scale before the first step
        left = self.residual(name, saved["memory"]["residual"]) / (saved["loss_scale"] or 1.0)
        return self.begin[name] - _whole(self.weight(head)) + left

    def own(self):
        """Replace the optimizers. A head that had none begins with what its residual has then."""
        known = self.expected
        owners = self.draw.choice([["ab"], ["ab"], ["a"], ["b"], ["a", "b"]])
        self.optimizers = {
            heads: torch.optim.SGD([*map(self.weight, heads)], lr=1.0, fused=self.fused)
            for heads in owners
        }
        self.zero_grad()
        heads = "".join(owners)
        self.expected = {head: known[head] if head in known else self.total(head) for head in heads}

    def zero_grad(self):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def look(self):
        """Read the state at any time, which must not change the training."""
        if self.draw.random() < 0.2:
            self.compressor.state_dict()

    def step(self):
        draw, rank, size = self.draw, dist.get_rank(), dist.get_world_size()
        gradients = {head: torch.zeros(WIDTH, WIDTH) for head in "ab"}
        void = set()
        if not self.late:
            self.zero_grad()
        count = draw.randint(1, 3)
        failing = draw.randrange(count) if draw.random() < 0.4 else None
        for number in range(count):
            exchanges = number == count - 1 or draw.random() < 0.6
            heads = draw.choice(["a", "b", "ab", "ab"])
            infinite = draw.choice(["a", "b", "ab"])
            inputs, targets = _batch(draw)
            on_rank = draw.randrange(size)
            with self.without_exchange(exchanges):
                results = dict(zip(heads, self.model(inputs, heads)))
                if self.late and number == 0:  # between forward and backward
                    self.zero_grad()
                losses = {head: (result * targets).sum() for head, result in results.items()}
                if number == failing:
                    void |= {head for head in infinite if head in losses}
                    if rank == on_rank:
                        for head in void:
                            losses[head] = losses[head] * float("inf")
                self.scaler.scale(sum(losses.values())).backward()
            for head in heads:
                gradients[head] += targets.t() @ inputs
            self.look()
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        self.end_step({head: one / size for head, one in gradients.items()}, void)

    def end_step(self, gradients, void):
        before = {head: _whole(self.weight(head)) for head in "ab"}
        with_gradients = {
            heads: optimizer
            for heads, optimizer in self.optimizers.items()
            if any(self.weight(head).grad is not None for head in heads)
        }
        for optimizer in with_gradients.values():
            self.scaler.step(optimizer)
            self.look()
        if with_gradients:
            self.scaler.update()
        for heads in self.optimizers:
            skips = bool(void.intersection(heads))
            self.skipped += skips
            used = any(bool(gradients[head].any()) for head in heads)
            moved = any(not torch.equal(before[head], _whole(self.weight(head))) for head in heads)
            assert moved == (used and not skips), f"seed {self.seed}"
            if not skips:
                for head in heads:
                    self.expected[head] += gradients[head]

    def check(self):
        """Hold what the optimizers have applied to the gradients."""
        for head, expected in self.expected.items():
            torch.testing.assert_close(
                self.total(head), expected, rtol=1e-4, atol=1e-3,
                msg=lambda text, head=head: f"seed {self.seed}, {head}: {text}",
            )  # fmt: skip


def run(seed, build):
    """Train with random passes, overflows, optimizers and calls of zero_grad; all ranks call this.

    Returns:
        How many steps the scaler has skipped.
    """
    program = Program(seed, build)
    for _ in range(3):
        program.own()
        for _ in range(program.draw.randint(1, 6)):
            program.step()
        program.check()
    return program.skipped


def scenario_skipped_steps_of_several_passes_lose_nothing(directory):
    assert sum(run(seed, ddp_model) for seed in range(20))
