"""More scenarios of torch_schedule.py: what uncompressed messages of plans do with the residual."""

import warnings

import horovod.torch as hvd
import torch
from torch_given_plans import CODEC, plan_of
from torch_gradients_tools import expect
from torch_tools import follow_layout

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule import Message

_SHAPE = 40, 30


class GivenGradients:
    """A weight whose gradients are given, and its compressor.

    Args:
        options: arguments of the compressor.
    """

    def __init__(self, **options):
        self.weight = torch.nn.Parameter(torch.zeros(_SHAPE))
        named = [("weight", self.weight)]
        self.compressor = dr.Compressor(CODEC, parameters=named, dense_below=0, **options)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0),
            named_parameters=named,
            compression=self.compressor,
        )

    def follow(self, way):
        """Send the gradients in a way from the next step on."""
        compressor = self.compressor
        compressor.adapter.scheduler.layout = layout.of_plan(
            compressor.policies, compressor.fingerprint, plan_of([Message(("weight",), way)])
        )
        follow_layout(compressor)

    def step(self, gradient):
        """Return the average of the gradients of all ranks."""
        self.weight.grad = None
        (self.weight * gradient).sum().backward()
        self.optimizer.synchronize()
        return self.weight.grad.clone()

    @property
    def residual(self):
        return self.compressor.state_dict()["parameters"]["weight"]["memory"]["residual"]


def scenario_float16_messages_lose_nothing_at_any_magnitude(directory):
    """Residuals keep what float16 cannot carry: small parts, and parts beyond its range."""
    for exponent in (-10, -8, -6, -3, 0, 3, 5):
        for given in (True, False):
            plan = plan_of([Message(("weight",), "fp16")])
            job = GivenGradients(schedule=plan if given else "auto")
            job.compressor.adapter.scheduler.step_ends = lambda *_: None
            if not given:
                job.follow("fp16")
            draw = torch.Generator().manual_seed(100 + exponent)
            direction = torch.randn(_SHAPE, generator=draw) * 10.0**exponent
            draw = torch.Generator().manual_seed(hvd.rank())
            came, arrived = torch.zeros(2, *_SHAPE, dtype=torch.float64)
            for _ in range(20):
                gradient = direction * torch.rand(_SHAPE, generator=draw) * 2
                came += gradient.double()
                average = job.step(gradient)
                expect(bool(average.isfinite().all()), "a sum overflowed", exponent)
                arrived += average.double()
            own = came - job.residual.double().view(_SHAPE)
            both = hvd.allreduce(torch.stack([own, came]), op=hvd.Average)
            lost = float((both[0] - arrived).norm() / both[1].norm())
            uneven = hvd.size() & (hvd.size() - 1) and exponent < -3
            expect(lost < (0.03 if uneven else 1e-3), "lost", lost, exponent, given)


def scenario_gloo_omits_numbers_from_sums_of_float16(directory):
    """Rank 0 warns of that with ``loss_scale=``, for settings and for a plan.

    If Horovod's sums are right one day, this test fails, and ``sums_float16`` is not needed.
    """
    numbers = (20000.0, 9920.0, 0.0)
    own = torch.full((8,), numbers[min(hvd.rank(), 2)]).half()
    found = hvd.allreduce(own, op=hvd.Sum).float()
    expect(bool((found != 29920).any()), "Horovod sums float16 rightly:", found)
    plan = plan_of([Message(("weight",), "fp16")])
    for scale, codec, schedule, warns in (
        (None, "fp16", None, False), (lambda: 1024.0, CODEC, None, False),
        (lambda: 1024.0, "fp16", None, True), (None, CODEC, plan, False),
        (lambda: 1024.0, CODEC, plan, True), (lambda: 1024.0, "dense", plan, False),
    ):  # fmt: skip
        weight = torch.nn.Parameter(torch.zeros(_SHAPE))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dr.Compressor(
                codec, parameters=[("weight", weight)], loss_scale=scale, schedule=schedule,
                dense_below=0,
            )  # fmt: skip
        told = [str(one.message) for one in caught if "Gloo omits" in str(one.message)]
        expect(len(told) == (warns and hvd.rank() == 0), codec, "warnings:", told)
        expect(all("'fp16' for weight" in one for one in told), "the warning is", told)


def scenario_nan_leaves_the_residual_as_it_is(directory):
    """Whichever way the gradient is sent; and the user is warned."""
    for way in ("codec", "dense", "fp16"):
        job = GivenGradients()
        draw = torch.Generator().manual_seed(hvd.rank())
        for _ in range(3):
            job.step(torch.randn(_SHAPE, generator=draw))
        if way != "codec":
            job.follow(way)
        before = job.residual
        gradient = torch.randn(_SHAPE, generator=draw)
        gradient[3, 4] = float("nan")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            average = job.step(gradient)
        expect(bool(average.isnan().any()), way, "hides NaN")
        expect(torch.equal(job.residual, before), way, "changed the residual")
        told = [str(one.message) for one in caught if "NaN or Inf" in str(one.message)]
        expect(len(told) == 1 and "parameter weight" in told[0], way, "warnings:", told)
