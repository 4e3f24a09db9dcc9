"""Choose the layout of a job's steps by what is measured while it trains: ``schedule="auto"``.

The steps of a job go through these phases, the same on all ranks:

1. *warm-up*: until the density of the sparsifiers no longer falls, and until no other compressor of
   the process tries plans.
2. *profile*: some steps are timed. Then collectives of several sizes are timed between two steps.
3. *trial*: rank 0 makes plans from the measurements of all ranks. The plans take turns of some
   steps each, and slow ones drop out (:mod:`deepreduce_hvd.planning.race`).
4. *watch*: the plan with the shortest measured steps is used. Everything is measured again when the
   step time changes much, or after a long time, but not while another compressor tries plans.

All decisions are made from numbers that all ranks have exchanged, so all ranks make the same ones
at the same step. Any plan gives correct sums, so training goes on in all phases.
"""

import dataclasses
import json
import time

import numpy as np

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.errors import InvalidArgumentError, PeerFailedError
from deepreduce_hvd.planning import layout, one_race
from deepreduce_hvd.planning.figures import Figures
from deepreduce_hvd.planning.measured_profile import (
    Costs,
    elements_of,
    measured_profile,
    profiled,
    totals,
)
from deepreduce_hvd.planning.measurements import (
    conversion_seconds,
    curve_of_policies,
    gather_overlap,
    network_tables,
)
from deepreduce_hvd.planning.race import Race
from deepreduce_hvd.planning.trials import (
    Trial,
    expect_one_way,
    fitted_to_step,
    plans_to_try,
    send_alike,
)
from deepreduce_hvd.schedule.plan import Plan, kept_share
from deepreduce_hvd.schedule.profile import Profile

#: steps that are not timed because caches and allocators are cold
_COLD_STEPS = 3
_PROFILE_STEPS = 6
#: Steps per turn, and how many of its first step times are ignored: the first one belongs to the
#: step before the turn, and the second includes messages that are new to Horovod.
_TURN_STEPS, _UNTIMED = 6, 2
#: A compressor waits for so many of its steps at most while another one tries its plans.
_MOST_WAITING = 1000
#: minimum steps, and minimum seconds, between two comparisons with the expected step time
_WINDOW, _WINDOW_SECONDS = 12, 1.0
#: Everything is measured again when two comparisons in a row differ by more than this ratio. Each
#: false alarm, which ends with the same plan, multiplies it by this ratio, up to the maximum.
_DIFFERENT, _MOST_DIFFERENT = 1.25, 2.5
#: Everything is also measured again after this many times the seconds that measuring takes, because
#: step times do not show that the network has become faster.
_REST = 100


class Scheduler:
    """The layout of one compressor's steps, now and in the next step.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        times: its :class:`~deepreduce_hvd.planning.step_times.StepTimes`.
        time_fp16: function of a number of elements and a device that converts so many elements as
            the adapter does, and returns the seconds (to float16, back).
        buckets: function that returns the names of the parameters that share a message, for each
            message, if the framework decides that. Default: plans decide.
        on_host: whether the gradients of GPUs are encoded and summed on the host.
        communicators: names of the communicators that plans may use. Default: all that the codecs
            and memories support.
        tables: function that returns the names of the embedding tables, the same on all ranks in
            each step of the job.

    Attributes:
        layout: the layout for the next step.
        figures: the :class:`~deepreduce_hvd.planning.figures.Figures` that ranks exchange.
        trials: the plans that were tried last.
    """

    def __init__(
        self, compressor, times, time_fp16, buckets=lambda: None, on_host=False, communicators=None,
        tables=lambda: (),
    ):  # fmt: skip
        self._compressor = compressor
        self._times = times
        self._time_fp16 = time_fp16
        self._buckets = buckets
        self._on_host = on_host
        self._communicators = communicators
        self._tables = tables
        self._schedule = compressor.schedule
        self._base = layout.of_settings(compressor.first_policies, compressor.fingerprint)
        self._in_plans = layout.in_plans(self._base.policies)  # policies that plans may change
        if isinstance(self._schedule, Plan):
            self._base = self._layout_of(self._schedule)
        self.restart()

    def restart(self):
        """Forget all measurements, because the ranks may have changed."""
        self.layout = self._base
        self.trials = []
        self._measured = {}
        self._costs = self._curve = self._fitted = None
        self._totals = None  # those at the end of the warm-up
        self.figures = Figures(self._compressor)
        self._different, self._differing = _DIFFERENT, 0
        self._waited = 0  # steps in which another compressor tried plans
        one_race.give_back(self)
        self._begin(self._warm_up, _COLD_STEPS)

    def _begin(self, phase, steps):
        """Begin a phase of ``steps`` steps; ``phase`` is called at the end of each step."""
        self._phase, self._left, self._seconds = phase, steps, []
        self._since = one_race.steps()

    # --- what the adapter calls ---

    def step_ends(self, transport, slots):
        """Move on by one step; called on all ranks when a step has all its results.

        Args:
            transport: transport over the ranks.
            slots: slots of the parameters, by name.

        The layout of the next step may be another one after this.
        """
        if self._totals is None and self._is_warm(slots):
            self._totals = totals(slots)
        if self._schedule != "auto" or transport.size == 1 or not self._in_plans:
            return
        one_race.step_ends(self)
        if self._times.seconds is not None:
            self._seconds.append(self._times.seconds)
        self._left -= 1
        self._phase(transport, slots)

    @property
    def is_trying(self):
        """Whether plans are being tried."""
        return self._phase == self._trial

    def notes(self, tables):
        """Return sentences for the user.

        Args:
            tables: names of the embedding tables that were found.
        """
        if self._schedule is None:
            return []
        if self._schedule == "auto" and not {*self._in_plans} - {*tables}:
            some = any(not one.dense for one in self._base.policies.values())
            besides = " besides those of embedding tables" if some else ""
            return [f"Schedule: no plan, because no gradient{besides} is compressed."]
        if self.layout.plan is None:
            return ["Schedule: no plan yet, buckets."]
        found = self.layout.notes(tables, self.is_trying)
        if self.trials:
            found.append(f"Measured steps: {', '.join(one.in_words() for one in self.trials)}.")
        return found

    # --- phases ---

    def _warm_up(self, transport, slots):
        if self._left <= 0 and self._is_warm(slots):
            if not {*self._in_plans} - {*self._tables()}:  # only tables are left
                self._begin(self._warm_up, _WINDOW)
                return
            # Ranks may take the steps of several compressors in other orders, so they have to
            # agree. A compressor whose steps compress nothing never ends its measurements.
            if self._waited < _MOST_WAITING and self._is_busy(transport):
                self._waited += _WINDOW
                self._begin(self._warm_up, _WINDOW)
                return
            self._begin_profile(slots)

    def _is_busy(self, transport):
        """Return whether another compressor tries plans, on any rank."""
        self.figures.call_ranks(transport)
        return self.figures.slowest(transport, [float(one_race.is_busy(self, self._since))]) != [
            0.0
        ]

    def _is_warm(self, slots):
        """Return whether the density of the sparsifiers no longer falls."""
        steps = max((slot.steps for slot in slots.values()), default=0)
        return steps >= max(map(_warm_up_of, self._base.policies.values()), default=0)

    def _begin_profile(self, slots):
        one_race.take(self)
        self._totals = totals(slots)
        self._begin(self._profile, _PROFILE_STEPS)

    def _profile(self, transport, slots):
        if self._left > 0:
            return
        if not self._profiled(slots):  # with several optimizers, a step may compress nothing
            one_race.give_back(self)
            self._begin(self._warm_up, _WINDOW + 1)  # another one asks after _WINDOW steps
            return
        self._costs = self._costs_since_warm_up(slots)
        self._measure_and_plan(transport, slots)

    def _measure_and_plan(self, transport, slots):
        """Measure the network, make plans, and begin the trials."""
        started = time.perf_counter()
        self.figures.call_ranks(transport)
        (seconds,) = self.figures.slowest(transport, [np.median(self._seconds)])
        self._measured = {
            **network_tables(self.figures, transport, list(elements_of(slots).values())),
            "gather_overlap": gather_overlap(self.figures, transport),
            **self._measured_costs(slots),
        }
        own = self._current_profile(slots, transport.size)
        profiles = self.figures.gathered(transport, own.to_json().encode())
        found = failure = None
        if transport.rank == 0:
            try:
                merged = Profile.merged([Profile.from_json(text.decode()) for text in profiles])
                devices = {str(self._device_of(slot)) for slot in slots.values()}
                on_device = devices != {"cpu"}
                allowed = self._communicators or layout.communicators_of(self._base.policies)
                communicators = ("Allgather",) if on_device else allowed
                if self._fitted is None:  # the steps so far used buckets
                    self._fitted = fitted_to_step(merged, seconds, self._buckets())
                merged = dataclasses.replace(merged, **self._fitted)
                exact = transport.sums_float16(on_host="cpu" in devices)
                ways = layout.ways_of(self._base.policies, exact)
                plans = plans_to_try(merged, communicators, self._buckets(), ways)
                found = json.dumps([self._fitted, plans]).encode()
            except Exception as error:  # tell the other ranks, or they would wait
                found, failure = json.dumps(wire.describe(error)).encode(), error
        content = json.loads(self.figures.of_first(transport, found).decode())
        if isinstance(content, str):
            raise failure or PeerFailedError(f"schedule: rank {transport.ranks[0]}: {content}")
        self._fitted, plans = content
        self._measured.update(self._fitted)
        self._plans = [(rule, Plan.from_json(text)) for rule, text in plans]
        self._before = self.layout.plan
        (self._planning_seconds,) = self.figures.slowest(transport, [time.perf_counter() - started])
        self._medians = {}  # number of a plan -> medians of the steps of its turns
        self.trials = []
        self._race = Race([plan.step_seconds for _, plan in self._plans])
        self._begin_turn()

    def _begin_turn(self):
        assert self._race.current is not None
        self.layout = self._layout_of(self._plans[self._race.current][1])
        self._begin(self._trial, _TURN_STEPS)

    def _layout_of(self, plan):
        return layout.of_plan(self._base.policies, self._compressor.fingerprint, plan)

    def _trial(self, transport, slots):
        if self._left > 0:
            return
        self.figures.call_ranks(transport)
        # without the longest one, which may contain an evaluation or a checkpoint
        timed = sorted(self._seconds[_UNTIMED:])
        mean, median = self.figures.slowest(transport, [np.mean(timed[:-1]), np.median(timed)])
        self._medians.setdefault(self._race.current, []).append(median)
        self._race.turn_ends(mean)
        elements = elements_of(slots)
        shares = [kept_share(plan.messages, elements) for _, plan in self._plans]
        self.trials = [
            Trial(rule, plan.step_seconds, self._race.seconds(number), shares[number])
            for number, (rule, plan) in enumerate(self._plans)
            if number in self._race.tried
        ]
        if self._race.current is not None:
            self._begin_turn()
            return
        winner = self._race.winner(shares)
        chosen = self._plans[winner][1]
        if self._before is None or not send_alike(self._before, chosen):
            self._different = _DIFFERENT
        elif self._differing >= 2:  # a false alarm
            self._different = min(_DIFFERENT * self._different, _MOST_DIFFERENT)
        self.layout = self._layout_of(chosen)
        # medians, as those that are compared with it: some steps may always be longer than others
        self._expected = float(np.mean(self._medians[winner]))
        fastest = self._race.seconds(winner)
        lost = _TURN_STEPS * sum(
            max(seconds - fastest, 0) for turns in self._race.blocks for seconds in turns
        )
        self._until_rest_ends = _REST * (self._planning_seconds + lost) / fastest
        self._differing = self._waited = 0
        one_race.give_back(self)
        self._begin_window()

    def _begin_window(self):
        self._window = max(_WINDOW, int(_WINDOW_SECONDS / self._expected) + 1)
        self._begin(self._watch, self._window)

    def _watch(self, transport, slots):
        if self._left > 0:
            return
        self.figures.call_ranks(transport)
        busy = float(one_race.is_busy(self, self._since))
        measured, busy = self.figures.slowest(transport, [np.median(self._seconds[1:]), busy])
        self._until_rest_ends -= self._window
        if busy and self._waited < _MOST_WAITING:  # another one's trials change these steps
            self._waited += self._window
            self._differing = 0
            self._begin_window()
            return
        if not busy:
            self._waited = 0
        differs = _ratio(measured, self._expected) > self._different
        self._differing = self._differing + 1 if differs else 0
        due = self._differing >= 2 or self._until_rest_ends <= 0
        if due and self._profiled(slots):
            one_race.take(self)
            self._measure_and_plan(transport, slots)
        else:
            self._begin_window()

    # --- measurements ---

    def profile(self, slots, ranks):
        """Return the :class:`~deepreduce_hvd.schedule.Profile` of this rank.

        Args:
            slots: slots of the parameters, by name.
            ranks: number of ranks; each counts as a host of its own, because the tables are
                measured between all of them.

        Raises:
            InvalidArgumentError: the job has a fixed plan, whose steps do not show what the other
                ways of its gradients cost; no step with a compressed gradient is complete yet; the
                density still falls, so that payloads are larger than they will be; or the codecs
                have different ratios.
        """
        if isinstance(self._schedule, Plan):
            expect_one_way(self._schedule)
        for name in self._profiled(slots):
            steps, warm_up = slots[name].steps, _warm_up_of(self._base.policies[name])
            if steps <= warm_up:
                raise InvalidArgumentError(
                    f"profile: expected steps after the warm-up of {warm_up} steps, got step"
                    f" {steps} for {name}"
                )
        return self._current_profile(slots, ranks)

    def _current_profile(self, slots, ranks):
        if not self._measured:
            self._measured = self._measured_costs(slots)
        return measured_profile(
            self._base.policies,
            self._times,
            slots,
            ranks,
            self._tables(),
            self._costs or self._costs_since_warm_up(slots),
            **self._measured,
        )

    def _costs_since_warm_up(self, slots):
        """Return {parameter name: Costs}, or None if no step is over since the warm-up."""
        ends, before = totals(slots), self._totals
        if before is None or ends == before:
            return None
        return {name: Costs.of_steps(ends[name], before[name], slots[name]) for name in ends}

    def _profiled(self, slots):
        """Return the names of the parameters that the last complete step compressed."""
        return profiled(self._base.policies, self._times, slots, self._tables())

    def _measured_costs(self, slots):
        """Return what conversion and encoding cost, as arguments of ``measured_profile``."""
        device = self._device_of(next(iter(slots.values())))
        if self._curve is None:
            self._curve = curve_of_policies(self._in_plans.values())
        costs = {} if self._curve is None else self._curve._asdict()
        if str(device) != "cpu":  # a GPU encodes its own gradients
            costs.pop("seconds_per_kept_element", None)
        return {**conversion_seconds(self._time_fp16, device), **costs}

    def _device_of(self, slot):
        return "cpu" if self._on_host else slot.parameter.device


def _warm_up_of(policy):
    """Return the number of steps in which the density of a policy changes."""
    return 0 if policy.codec is None else policy.codec.sparsifier.schedule_steps


def _ratio(one, other):
    return max(one / other, other / one)
