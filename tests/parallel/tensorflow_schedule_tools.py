"""Shared by the TensorFlow scenarios of ``schedule="auto"``: compressors, plans and checks."""

import contextlib
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import random_plans
from tensorflow_overflow_tools import compressor_of, residuals
from tensorflow_tools import sum_over_ranks

import deepreduce_hvd as dr
from deepreduce_hvd.planning import layout
from deepreduce_hvd.schedule import Message

CODEC = dr.Codec(dr.TopK(0.05), index=dr.Rice(), value=dr.LloydMax(bits=1))


@dr.register
class OwnValues(dr.RawValue):
    """Values of a custom stage, which fails on demand."""

    stage_id = 201
    fails = False

    def encode(self, values, key):
        if self.fails:
            raise dr.InvalidArgumentError("values: expected good ones, got others")
        return super().encode(values, key)


def auto(network, codec=CODEC, **options):
    return compressor_of(network, codec, schedule="auto", **options)


def follow(compressor, plan):
    """Use a plan from the next step on, and keep it; None for no plan."""
    scheduler = compressor.adapter.auto.scheduler
    scheduler.step_ends = lambda transport, slots: None
    scheduler.restart()
    if plan is not None:
        scheduler.layout = layout.of_plan(compressor.policies, compressor.fingerprint, plan)


def plan_of(**ways):
    messages = [Message((name,), way) for name, way in ways.items()]
    return random_plans.plan_of(messages, hvd.size(), repr(CODEC))


def numbers_of_scheduler(compressor):
    """Return the number of collectives of the scheduler so far."""
    return compressor.adapter.auto.scheduler.figures.calls


def agreed(found):
    """Return what all ranks have found, after a check that it is the same."""
    everyone = hvd.allgather_object(found)
    assert all(one == found for one in everyone), everyone
    return found


@contextlib.contextmanager
def equal_times(compressor, seconds=lambda step: 1.0):
    """Pretend that every step takes ``seconds(step)``, so that all decisions are known.

    These seconds are much longer than predicted, so all plans take part.

    Yields:
        Lists of the plan after each step, as JSON, and of the number of the scheduler's collectives.
    """
    own, plans, calls = compressor.adapter.auto, [], []
    step_ends = own.scheduler.step_ends

    def ends(*arguments):
        if own._times.seconds is not None:
            own._times.seconds = seconds(len(plans))
        step_ends(*arguments)
        plans.append("" if compressor.plan is None else compressor.plan.to_json())
        calls.append(numbers_of_scheduler(compressor))

    with mock.patch.object(own.scheduler, "step_ends", ends):
        yield plans, calls


def expect_mass_balance(compressor, network, came, arrived, halved, scale=1.0):
    """Check that what was sent plus what is kept equals all gradients, over all ranks."""
    kept = residuals(compressor)
    for name, variable in network.items():
        total = sum_over_ranks(came[name])
        own = (
            kept[name].reshape(variable.shape) / scale if name in kept else np.zeros(variable.shape)
        )
        left = sum_over_ranks(own)
        largest = np.abs(total).max()
        limit = 3e-3 if name in halved else 1e-5  # float16 rounds
        difference = np.abs(arrived[name] + left - total).max()
        assert difference <= limit * (largest + 1), (name, difference, largest)
