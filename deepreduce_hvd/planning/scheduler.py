"""Choose the layout of a job's steps by what is measured while it trains: ``schedule="auto"``.

The steps of a job go through these phases, the same on all ranks:

1. *warm-up*: until the density of the sparsifiers no longer falls.
2. *profile*: some steps are timed. Then collectives of several sizes are timed between two steps.
3. *trial*: rank 0 makes plans from the measurements of all ranks. The plans take turns of some
   steps each, and slow ones drop out (:mod:`deepreduce_hvd.planning.race`).
4. *watch*: the plan with the shortest measured steps is used. Everything is measured again when the
   step time changes much, or after a long time.

All decisions are made from numbers that all ranks have exchanged, so all ranks make the same ones
at the same step. Any plan gives correct sums, so training goes on in all phases.
"""

import json
import time

import numpy as np

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.roll_call import RollCall
from deepreduce_hvd.errors import PeerFailedError
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.measured_profile import (
    Costs,
    elements_of,
    measured_profile,
    profiled,
    totals,
)
from deepreduce_hvd.planning.race import Race
from deepreduce_hvd.planning.trials import Trial, expect_one_way, in_words, plans_to_try, send_alike
from deepreduce_hvd.schedule.links import Table
from deepreduce_hvd.schedule.plan import Plan, kept_share
from deepreduce_hvd.schedule.profile import Profile

#: steps that are not timed because caches and allocators are cold
_COLD_STEPS = 3
_PROFILE_STEPS = 6
#: Steps per turn, and how many of its first step times are ignored: the first one belongs to the
#: step before the turn, and the second includes messages that are new to Horovod.
_TURN_STEPS, _UNTIMED = 6, 2
#: minimum steps, and minimum seconds, between two comparisons with the expected step time
_WINDOW, _WINDOW_SECONDS = 12, 1.0
#: Everything is measured again when two comparisons in a row differ by more than this ratio. Each
#: false alarm, which ends with the same plan, multiplies it by this ratio, up to the maximum.
_DIFFERENT, _MOST_DIFFERENT = 1.25, 2.5
#: Everything is also measured again after this many times the seconds that measuring takes, because
#: step times do not show that the network has become faster.
_REST = 100
#: Sizes of the timed collectives in bytes. The series ends with the first that takes longer than
#: _LONG seconds, which is timed once, or before those larger than all gradients together.
_SIZES, _LONG = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26), 0.2
_REPEATS = 3
#: collectives of up to this many bytes are timed more often, because their times are noisy
_SMALL, _REPEATS_OF_SMALL = 1 << 14, 9
#: {collective that is timed: dtype}, by the names of a profile's tables
_COLLECTIVES = {"allgather": np.uint8, "allreduce": np.float32, "allreduce_fp16": np.float16}
_VALUES = 1 << 16  # random values, which are repeated
_CONVERTED = 1 << 22  # elements that are converted to float16 to time it


class Scheduler:
    """The layout of one compressor's steps, now and in the next step.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        times: its :class:`~deepreduce_hvd.planning.step_times.StepTimes`.
        time_fp16: function of a number of elements and a device that converts so many elements as
            the adapter does, and returns the seconds (to float16, back).
        buckets: function that returns the names of the parameters that share a message, for each
            message, if PyTorch decides that. Default: plans decide.
        on_host: whether the gradients of GPUs are encoded and summed on the host.

    Attributes:
        layout: the layout for the next step.
        trials: the plans that were tried last.
    """

    def __init__(self, compressor, times, time_fp16, buckets=lambda: None, on_host=False):
        self._compressor = compressor
        self._times = times
        self._time_fp16 = time_fp16
        self._buckets = buckets
        self._on_host = on_host
        self._schedule = compressor.schedule
        self._base = layout.of_settings(compressor.policies, compressor.fingerprint)
        if isinstance(self._schedule, Plan):
            self._base = layout.of_plan(compressor.policies, compressor.fingerprint, self._schedule)
        self.restart()

    def restart(self):
        """Forget all measurements, because the ranks may have changed."""
        self.layout = self._base
        self.trials = []
        self._network = {}
        self._costs = None
        self._calls = 0
        self._different, self._differing = _DIFFERENT, 0
        self._begin(self._warm_up, _COLD_STEPS)

    def _begin(self, phase, steps):
        """Begin a phase of ``steps`` steps; ``phase`` is called at the end of each step."""
        self._phase, self._left, self._seconds = phase, steps, []

    # --- what the adapter calls ---

    def step_ends(self, transport, slots):
        """Move on by one step; called on all ranks when a step has all its results.

        Args:
            transport: transport over the ranks.
            slots: slots of the parameters, by name.

        The layout of the next step may be another one after this.
        """
        if self._schedule != "auto" or transport.size == 1:
            return
        if self._times.seconds is not None:
            self._seconds.append(self._times.seconds)
        self._left -= 1
        self._phase(transport, slots)

    @property
    def is_trying(self):
        """Whether plans are being tried."""
        return self._phase == self._trial

    def notes(self):
        """Return sentences for the user."""
        if self._schedule is None:
            return []
        if self._schedule == "auto" and all(one.dense for one in self._base.policies.values()):
            return ["Schedule: no plan, because no gradient is compressed."]
        if self.layout.plan is None:
            return ["Schedule: no plan yet, buckets."]
        trial = ", on trial" if self.is_trying else ""
        found = [f"Schedule{trial}: {in_words(self.layout.plan)}."]
        if self.trials:
            tried = ", ".join(
                f"{one.rule} {1e3 * one.measured:.1f} ms ({1e3 * one.predicted:.1f} predicted)"
                for one in self.trials
            )
            found.append(f"Measured steps: {tried}.")
        return found

    # --- phases ---

    def _warm_up(self, transport, slots):
        steps = max((slot.steps for slot in slots.values()), default=0)
        codecs = {one.codec for one in self._base.policies.values() if one.codec is not None}
        if self._left <= 0 and steps >= max(
            (codec.sparsifier.schedule_steps for codec in codecs), default=0
        ):
            self._begin_profile(slots)

    def _begin_profile(self, slots):
        self._totals = totals(slots)
        self._begin(self._profile, _PROFILE_STEPS)

    def _profile(self, transport, slots):
        if self._left > 0:
            return
        if not self._profiled(slots):  # with several optimizers, a step may compress nothing
            self._begin_profile(slots)
            return
        self._costs = {
            name: Costs.of_steps(ends, self._totals[name], slots[name])
            for name, ends in totals(slots).items()
        }
        self._measure_and_plan(transport, slots)

    def _measure_and_plan(self, transport, slots):
        """Measure the network, make plans, and begin the trials."""
        started = time.perf_counter()
        self._call_ranks(transport)
        self._network = {
            **self._measured_tables(transport, slots),
            **self._measured_conversions(slots),
        }
        own = self.profile(slots, transport.size)
        profiles = self._gathered(transport, own.to_json().encode())
        plans = failure = None
        if transport.rank == 0:
            try:
                merged = Profile.merged([Profile.from_json(text.decode()) for text in profiles])
                on_device = any(str(self._device_of(slot)) != "cpu" for slot in slots.values())
                communicators = (
                    ("Allgather",) if on_device else layout.communicators_of(self._base.policies)
                )
                found = plans_to_try(merged, communicators, self._buckets())
                plans = json.dumps(found).encode()
            except Exception as error:  # tell the other ranks, or they would wait
                plans, failure = json.dumps(wire.describe(error)).encode(), error
        agreed = transport.broadcast(
            None if plans is None else np.frombuffer(plans, dtype=np.uint8), 0, self._name("plans")
        )
        found = json.loads(np.asarray(transport.wait(agreed)).tobytes().decode())
        if isinstance(found, str):
            raise failure or PeerFailedError(f"schedule: rank {transport.ranks[0]}: {found}")
        self._plans = [(rule, Plan.from_json(text)) for rule, text in found]
        self._before = self.layout.plan
        (self._planning_seconds,) = self._slowest(transport, [time.perf_counter() - started])
        self._medians = {}  # number of a plan -> medians of the steps of its turns
        self.trials = []
        self._race = Race([plan.step_seconds for _, plan in self._plans])
        self._begin_turn()

    def _begin_turn(self):
        assert self._race.current is not None
        self.layout = self._layout_of(self._plans[self._race.current][1])
        self._begin(self._trial, _TURN_STEPS)

    def _layout_of(self, plan):
        return layout.of_plan(self._compressor.policies, self._compressor.fingerprint, plan)

    def _trial(self, transport, slots):
        if self._left > 0:
            return
        self._call_ranks(transport)
        timed = self._seconds[_UNTIMED:]
        mean, median = self._slowest(transport, [np.mean(timed), np.median(timed)])
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
        self._differing = 0
        self._begin_window()

    def _begin_window(self):
        self._window = max(_WINDOW, int(_WINDOW_SECONDS / self._expected) + 1)
        self._begin(self._watch, self._window)

    def _watch(self, transport, slots):
        if self._left > 0:
            return
        self._call_ranks(transport)
        (measured,) = self._slowest(transport, [np.median(self._seconds[1:])])
        differs = _ratio(measured, self._expected) > self._different
        self._differing = self._differing + 1 if differs else 0
        self._until_rest_ends -= self._window
        due = self._differing >= 2 or self._until_rest_ends <= 0
        if due and self._profiled(slots):
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
                ways of its gradients cost; or no step with a compressed gradient is complete yet.
        """
        if isinstance(self._schedule, Plan):
            expect_one_way(self._schedule)
        return measured_profile(
            self._base.policies, self._times, slots, ranks, self._costs, **self._network
        )

    def _profiled(self, slots):
        """Return the names of the parameters that the last complete step compressed."""
        return profiled(self._base.policies, self._times, slots)

    def _measured_tables(self, transport, slots):
        """Return {name of a profile's table: table of seconds by bytes} of this network."""
        largest = 4 * sum(elements_of(slots).values())
        tables = {}
        for kind in _COLLECTIVES:
            points: list[tuple[int, float]] = []
            for size in _SIZES:
                if len(points) > 1 and size > largest:
                    break
                seconds = self._repeated(transport, kind, size, 1)
                is_last = bool(points) and seconds[0] > _LONG
                if not is_last:
                    more = _REPEATS_OF_SMALL if size <= _SMALL else _REPEATS
                    seconds = self._repeated(transport, kind, size, more)
                points.append((size, float(np.median(seconds))))
                if is_last:
                    break
            tables[kind] = Table(tuple(points))
        return tables

    def _repeated(self, transport, kind, size, repeats):
        """Return (repeats,) float64 seconds of a collective of ``size`` bytes.

        Each is that of the slowest rank.
        """
        # float16 sums of zeros take less time than those of gradients
        values = 1e-3 * np.random.default_rng(0).standard_normal(_VALUES, np.float32)
        dtype = np.dtype(_COLLECTIVES[kind])
        array = np.resize(values, size // dtype.itemsize).astype(dtype)
        # a sum takes the place of its input, so each repetition gets a new copy
        own = [self._timed(transport, kind, array.copy()) for _ in range(repeats)]
        everywhere = self._gathered(transport, np.array(own, np.float64).tobytes())
        return np.stack([np.frombuffer(part, np.float64) for part in everywhere]).max(0)

    def _timed(self, transport, kind, array):
        """Return the seconds of one collective, which is used as in a step."""
        # gradients have the same name in each step, which saves Horovod work
        name = collective_name(self._compressor.number, f"schedule.{kind}.{array.nbytes}")
        # all ranks start together, or the wait for the last one would count
        transport.wait(transport.allreduce(np.zeros(1, np.float32), self._name("start")))
        started = time.perf_counter()
        if kind == "allgather":
            handle = transport.allgather(array, name)
            while not transport.test(handle):  # exchanges wait like this, allreduces as below
                transport.pause()
            transport.wait(handle)
        else:
            # Horovod copies gradients that it merges, but not a single one
            parts = np.split(array, 2) if transport.merges_sums else [array]
            handles = [
                transport.allreduce_in_place(part, f"{name}.{number}")
                for number, part in enumerate(parts)
            ]
            for handle in handles:
                transport.wait(handle)
        return time.perf_counter() - started

    def _measured_conversions(self, slots):
        """Return {name in a profile: seconds per element} of converting to float16 and back."""
        device = self._device_of(next(iter(slots.values())))
        pairs = [self._time_fp16(_CONVERTED, device) for _ in range(_REPEATS)]
        to_fp16, from_fp16 = np.median(pairs, axis=0) / _CONVERTED
        return {"to_fp16_seconds": float(to_fp16), "from_fp16_seconds": float(from_fp16)}

    def _device_of(self, slot):
        return "cpu" if self._on_host else slot.parameter.device

    def _call_ranks(self, transport):
        RollCall(transport, self._name("ranks")).wait()

    def _slowest(self, transport, seconds):
        """Return the largest of all ranks' numbers, for each of a list of them."""
        parts = self._gathered(transport, np.array(seconds, np.float64).tobytes())
        return np.max([np.frombuffer(part, np.float64) for part in parts], axis=0).tolist()

    def _gathered(self, transport, content):
        """Return the bytes that each rank gives, in rank order."""
        size = np.frombuffer(np.uint32(len(content)).tobytes(), dtype=np.uint8)
        data = np.concatenate([size, np.frombuffer(content, dtype=np.uint8)])
        gathered = np.asarray(transport.wait(transport.allgather(data, self._name("figures"))))
        joined, parts = gathered.tobytes(), []
        while joined:
            end = 4 + int(np.frombuffer(joined[:4], np.uint32)[0])
            parts.append(joined[4:end])
            joined = joined[end:]
        return parts

    def _name(self, label):
        self._calls += 1
        return collective_name(self._compressor.number, f"schedule.{label}.{self._calls}")


def _ratio(one, other):
    return max(one / other, other / one)
