"""When the gradients, messages and results of a step came, for profiles and timelines."""

import bisect
import collections
import statistics

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import COMPUTE, NETWORK, THREADS, Event, Timeline
from deepreduce_hvd.schedule.pictures import write_trace

_KEPT_STEPS = 6
#: events of a step that are kept; without an optimizer, steps have no end
_MOST_EVENTS = 50_000


class StepTimes:
    """The times of the steps of a job, in seconds. A step begins with its first gradient.

    With several optimizers, a step has at most one step of each.

    Attributes:
        seconds: from the beginning of the last complete step to that of the next one, or None.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        """Forget all steps."""
        self.seconds = None
        # (ready, rest) of complete steps
        self._kept: collections.deque = collections.deque(maxlen=_KEPT_STEPS)
        self._timeline = None
        self._begun = self._ended = None
        self._own = 0.0
        self._ready = {}
        self._events: collections.deque = collections.deque(maxlen=_MOST_EVENTS)

    @property
    def ready(self):
        """{parameter name: seconds from the beginning of a step to its gradient}.

        The time that the compressor itself took until then is left out. The numbers are medians
        over those of the last complete steps in which the parameter had a gradient. Optimizers that
        share a compressor need not all take part in each step.
        """
        names = dict.fromkeys(name for ready, _ in self._kept for name in ready)
        return {
            name: statistics.median(ready[name] for ready, _ in self._kept if name in ready)
            for name in names
        }

    @property
    def rest(self):
        """Median of the seconds from the last result of a step to the beginning of the next one.

        These are the optimizer's step, loading of data, forward, and backward until its first
        gradient.
        """
        return statistics.median(rest for _, rest in self._kept) if self._kept else 0.0

    def begin(self, now):
        """Record the start of a step at ``now``, a time of ``time.perf_counter``."""
        if self._begun is not None:
            self.seconds = now - self._begun
            self._kept.append((self._ready, max(now - self._ended, 0.0)))
            self._timeline = self._begun, self._ended, self._events, self.seconds
        self._begun = self._ended = now
        self._own, self._ready = 0.0, {}
        self._events = collections.deque(maxlen=_MOST_EVENTS)

    def gradients(self, names, label, started, ended):
        """Record gradients that arrived together and were processed until ``ended``.

        The first gradient of a step may arrive a little before the step is recorded to begin.
        """
        if self._begun is not None:
            started = max(started, self._begun)
            ready = started - self._begun - self._own
            for name in names:
                self._ready[name] = ready
            self._own += ended - started
            self._events.append((COMPUTE, "encode", label, started, ended))

    def encoded(self, name, started, ended):
        """Record that a thread encoded a gradient from ``started`` to ``ended``."""
        self._events.append((THREADS, "encode", name, started, ended))

    def result(self, name, started, ended, track=COMPUTE):
        """Record that a result was asked for at ``started`` and returned at ``ended``.

        Args:
            name: name of the parameter.
            started, ended: times of ``time.perf_counter``.
            track: the track of the timeline, by the thread that decodes.
        """
        if self._begun is not None:
            self._ended = ended
            self._events.append((track, "decode", name, started, ended))

    def message(self, label, started, ended):
        """Record that a message was under way from ``started`` to ``ended``."""
        self._events.append((NETWORK, "network", label, started, ended))

    def timeline(self):
        """Return the last complete step as a :class:`~deepreduce_hvd.schedule.Timeline`, or None.

        Time 0 is the first gradient. Time outside the compressor counts as backward until the last
        gradient, and as the update and the next forward pass after the last result. In between, the
        device waits for other ranks, and has no bar. Decoding begins when a message has arrived.
        """
        if self._timeline is None:
            return None
        begun, ended, noted, seconds = self._timeline
        events, clock = [], begun
        own = sorted((event for event in noted if event[0] == COMPUTE), key=lambda one: one[3])
        arrivals = sorted(end for track, _, _, _, end in noted if track == NETWORK)
        for _, kind, name, start, end in own:
            if kind == "decode":
                # it waited for the last message that arrived while the result was asked for
                arrived = bisect.bisect_right(arrivals, end)
                start = max(start, arrivals[arrived - 1] if arrived else start)
            elif start > clock:
                events.append(Event(COMPUTE, "backward", name, clock - begun, start - begun))
            events.append(Event(COMPUTE, kind, name, start - begun, end - begun))
            clock = max(clock, end)
        events.append(Event(COMPUTE, "update", "until the next step", ended - begun, seconds))
        events += [
            Event(track, kind, name, start - begun, end - begun)
            for track, kind, name, start, end in noted
            if track != COMPUTE
        ]
        return Timeline(tuple(events), seconds)

    def write(self, path, plan):
        """Write the last complete step as a Chrome trace, beside the predicted one of a plan."""
        measured = self.timeline()
        if measured is None:
            raise InvalidArgumentError(
                "timeline: expected a complete step, got none yet; a step is complete when the next"
                " one begins"
            )
        predicted = {} if plan is None else {"predicted": plan.timeline}
        write_trace({"measured": measured, **predicted}, path)
