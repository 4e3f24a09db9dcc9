"""What uncompressed messages of plans do with the residual. Scenarios of ddp_scenarios.py."""

import warnings

import random_plans
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule import Message

_SHAPE = 40, 30


class _Weights(torch.nn.Module):
    """Two weights whose gradients are given."""

    def __init__(self, dtype):
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
        self.two = torch.nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))

    def forward(self, one, two):
        return (self.one * one).sum() + (self.two * two).sum()


class _GivenGradients:
    """A model with given gradients, and its compressor; each step follows the plan of ``ways``."""

    def __init__(self, memory=None, dtype=torch.float32):
        self.network = _Weights(dtype)
        self.model = DistributedDataParallel(self.network)
        self.compressor = dr.Compressor(
            dr.Codec(dr.TopK(0.05)),
            memory,
            parameters=self.network.named_parameters(),
            dense_below=0,
        )
        self.compressor.register(self.model)

    def follow(self, **ways):
        messages = [Message((name,), way) for name, way in ways.items()]
        compressor = self.compressor
        compressor.adapter.scheduler.layout = layout.of_plan(
            compressor.policies,
            compressor.fingerprint,
            random_plans.plan_of(messages, dist.get_world_size()),
        )

    def step(self, *gradients):
        """Return the averages of the gradients of all ranks, in float64."""
        self.network.zero_grad()
        self.model(*gradients).backward()
        return torch.stack([one.grad.double() for one in self.network.parameters()])

    @property
    def residuals(self):
        state = self.compressor.state_dict()["parameters"]
        return torch.stack([one["memory"]["residual"].double() for one in state.values()])


def scenario_float16_messages_lose_nothing_at_any_magnitude(directory):
    """Residuals keep what float16 cannot carry: small parts, and parts beyond its range."""
    for exponent in (-10, -8, -6, -3, 0, 3, 5):
        for ways in ({"one": "fp16", "two": "fp16"}, {"one": "fp16"}):
            job = _GivenGradients()
            job.follow(**ways)
            draw = torch.Generator().manual_seed(100 + exponent)
            direction = torch.randn(2, *_SHAPE, generator=draw) * 10.0**exponent
            draw = torch.Generator().manual_seed(dist.get_rank())
            came, arrived = torch.zeros(2, 2, *_SHAPE, dtype=torch.float64)
            for _ in range(20):
                gradients = direction * torch.rand(2, *_SHAPE, generator=draw) * 2
                came += gradients.double()
                average = job.step(*gradients)
                assert average.isfinite().all(), exponent
                arrived += average
            both = torch.stack([came - job.residuals.view_as(came), came])
            dist.all_reduce(both)
            both /= dist.get_world_size()
            lost = float((both[0] - arrived).norm() / both[1].norm())
            assert lost < 1e-3, (lost, exponent, ways)


def scenario_nan_leaves_the_residual_as_it_is(directory):
    """Whichever way the gradient is sent; and the user is warned."""
    for way in ("codec", "dense", "fp16"):
        job = _GivenGradients()
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            job.step(*torch.randn(2, *_SHAPE, generator=draw))
        if way != "codec":
            job.follow(one=way, two=way)
        before = job.residuals
        gradients = torch.randn(2, *_SHAPE, generator=draw)
        gradients[0, 3, 4] = float("nan")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert job.step(*gradients)[0].isnan().any(), way
        assert torch.equal(job.residuals[0], before[0]), way
        assert not torch.equal(job.residuals[1], before[1]), way
        told = [str(one.message) for one in caught if "NaN or Inf" in str(one.message)]
        assert len(told) == 1 and "parameter one" in told[0], (way, told)


def scenario_averages_of_all_dtypes(directory):
    """A whole bucket, or a part of it, is divided once, with a memory and without one."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for memory in (dr.NoMemory(), dr.Residual()):
            for ways in (("fp16", "fp16"), ("dense", "dense"), ("dense", "fp16")):
                job = _GivenGradients(memory, dtype)
                job.follow(one=ways[0], two=ways[1])
                draw = torch.Generator().manual_seed(dist.get_rank())
                gradients = torch.randn(2, *_SHAPE, generator=draw).to(dtype)
                expected = gradients.double()
                dist.all_reduce(expected)
                expected /= dist.get_world_size()
                near = max(torch.finfo(dtype).eps, 1e-3 if "fp16" in ways else 1e-6)
                torch.testing.assert_close(
                    job.step(*gradients), expected, rtol=0, atol=4 * near,
                    msg=lambda text, what=(dtype, memory, ways): f"{what}: {text}",
                )  # fmt: skip
