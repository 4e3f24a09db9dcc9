"""Test the trials of ``schedule="auto"`` with a virtual clock, and the steps of fake plans."""

import collections
import dataclasses
import random
from types import SimpleNamespace
from unittest import mock

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.planning import one_race, scheduler as scheduler_module
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.planning.race import Race
from deepreduce_hvd.planning.scheduler import Scheduler
from deepreduce_hvd.schedule import Message, Plan

_TRANSPORT = SimpleNamespace(size=2)
_POLICIES = {"weight": Policy("codec", dr.Codec(dr.TopK(0.01)), dr.Residual())}
_MEASURING = 0.5  # seconds
_WITHOUT = "without a plan"


class _OneRank:
    """The figures of a job whose ranks all have the same ones."""

    calls = 0

    def call_ranks(self, transport):
        self.calls += 1

    def slowest(self, transport, seconds):
        return [float(one) for one in seconds]


class Job:
    """A job of one or more compressors; the seconds of their plans add up.

    Args:
        costs: for each compressor, {name of a plan: seconds in a step}.
        noise: standard deviation of the logarithm of a step's seconds.
    """

    def __init__(self, *costs, noise=0.02, seed=0):
        self.clock = self.since = 0.0
        self._draw, self._noise = random.Random(seed), noise
        self.costs, self.schedulers = costs, []
        #: for each step, the compressors that measure or try plans
        self.trying = []
        for own in costs:
            compressor = SimpleNamespace(
                first_policies=_POLICIES, fingerprint=0, schedule="auto", number=0
            )
            scheduler = Scheduler(compressor, SimpleNamespace(seconds=None), None)
            scheduler.figures, scheduler._profiled = _OneRank(), lambda slots: ["weight"]
            scheduler._costs_since_warm_up = lambda slots: {}
            scheduler._layout_of = lambda plan: SimpleNamespace(plan=plan)
            scheduler._measure_and_plan = self._measuring(scheduler, own)
            self.schedulers.append(scheduler)

    def _measuring(self, scheduler, costs):
        def measure_and_plan(transport, slots):
            self.clock += _MEASURING
            plan = Plan((Message(("weight",)),), (), 0.0, "none", "none", 2, 1, "none")
            scheduler._plans = [
                (name, dataclasses.replace(plan, link=name)) for name in costs if name != _WITHOUT
            ]
            scheduler._before, scheduler._planning_seconds = scheduler.layout.plan, _MEASURING
            scheduler._medians, scheduler.trials = {}, []
            scheduler._race = Race([0.0] * len(scheduler._plans))
            scheduler._begin_turn()

        return measure_and_plan

    def plan(self, number=0):
        """Return the name of the plan of a compressor."""
        plan = self.schedulers[number].layout.plan
        return _WITHOUT if plan is None else plan.link

    def is_racing(self, number):
        return self.schedulers[number]._phase.__name__ in ("_profile", "_trial")

    def steps(self, count, **arguments):
        for _ in range(count):
            self.step(**arguments)

    def step(self, pause=0.0, used=None):
        """Take one step with the compressors in ``used``, and pause after it."""
        begun, used = self.clock, range(len(self.costs)) if used is None else used
        seconds = 0.01 + sum(self.costs[number][self.plan(number)] for number in used)
        self.clock += seconds * self._draw.lognormvariate(0, self._noise)
        for number in used:
            scheduler = self.schedulers[number]
            # a step ends when the next one begins, so this is the step before
            scheduler._times.seconds = begun - self.since if begun else None
            scheduler.step_ends(_TRANSPORT, {"weight": SimpleNamespace(
                steps=0, shape=(1,), encode_seconds=0, decode_seconds=0, untimed_steps=0
            )})  # fmt: skip
        self.since = begun
        self.clock += pause
        self.trying.append([number for number in range(len(self.costs)) if self.is_racing(number)])


@pytest.fixture(autouse=True)
def _free():
    with mock.patch.object(one_race, "_holder", None):
        yield


@pytest.fixture
def two():
    """Return a job of two compressors, whose best plan is "dense"."""
    return Job(*({_WITHOUT: 0.02, "encoded": 0.02, "dense": 0.01} for _ in range(2)))


@pytest.mark.parametrize("every", [20, 30, 50])
@pytest.mark.parametrize("pause", [0.3, 2.0])
def test_pauses_for_evaluations_do_not_choose_the_plan(every, pause):
    """Wherever they are in the trials."""
    costs = {_WITHOUT: 0.02, "encoded": 0.02, "dense": 0.06, "half": 0.04}
    chosen = collections.Counter()
    for offset in range(every):
        job = Job(costs, seed=offset)
        for step in range(260):
            job.step(pause if (step + offset) % every == 0 else 0.0)
        assert not job.is_racing(0)
        chosen[job.plan()] += 1
    assert chosen == {"encoded": every}


@pytest.mark.parametrize("seed", range(6))
def test_one_compressor_tries_plans_at_a_time(seed):
    """So each finds its own best plan, whatever the other one sends."""
    draw = random.Random(seed)
    small = {_WITHOUT: 0.010, "encoded": 0.010, "dense": 0.004, "half": 0.008}
    large = {_WITHOUT: 0.010, "encoded": 0.010, "dense": 0.080, "half": 0.045}
    costs = [draw.choice((small, large)) for _ in range(draw.choice((2, 3)))]
    job = Job(*costs, noise=0.01, seed=seed)
    job.steps(1500)
    assert max(map(len, job.trying)) == 1
    for number, own in enumerate(costs):
        assert any(number in racing for racing in job.trying), "a compressor had no trials"
        if not job.is_racing(number):
            assert own[job.plan(number)] == min(own.values()), job.plan(number)


@pytest.mark.parametrize("ratio", [1, 5])
def test_a_compressor_that_is_not_used_any_more_holds_nobody_up(two, ratio):
    """But one that is used in some of the steps does."""
    two.steps(12, used=[0])
    assert two.trying[-1] == [0]
    for step in range(200):
        two.step(used=[1] if step % ratio else [0, 1])
        if two.is_racing(0):
            assert not two.is_racing(1)
    assert two.is_racing(0) == (ratio > 1)
    two.steps(200, used=[1])
    assert two.plan(1) == "dense"


@pytest.mark.parametrize("most", [24, 60])
def test_nobody_waits_forever(two, most):
    """For a compressor that never ends its measurements."""

    def _profile(transport, slots):
        pass

    two.schedulers[0]._profile = _profile
    with mock.patch.object(scheduler_module, "_MOST_WAITING", most):
        two.steps(most)
        assert two.trying[-1] == [0]
        two.steps(250)
    assert two.plan(1) == "dense"


def test_steps_that_compress_nothing_hold_nobody_up(two):
    """And a compressor beside such steps still notices that its own steps have changed."""
    two.schedulers[0]._profiled = lambda slots: []
    two.steps(250)
    assert two.plan(1) == "dense"
    two.costs[1]["dense"] = 0.06
    two.steps(400)
    assert two.plan(1) == "encoded"


def test_a_compressor_that_compresses_nothing_has_no_trials(two):
    two.schedulers[0]._in_plans = {}
    two.steps(250)
    assert not any(0 in racing for racing in two.trying) and two.plan(1) == "dense"


def test_a_compressor_that_is_closed_holds_nobody_up(two):
    two.steps(30)
    two.schedulers[0].restart()
    two.steps(250, used=[1])
    assert two.plan(1) == "dense"
