"""The model of a step: the schedule of the device and the network.

The device computes forward, backward layer by layer, encodes each gradient after its layer, and
later decodes. Conversion to float16 and back counts as encoding and decoding. If a profile says so,
threads beside the device encode instead, one gradient after another, and backward goes on. Threads
that share cores with backward delay it by a part of the seconds in which they encode. The network
sends one message at a time, in the order of the gradients. A message starts when its last gradient
is encoded and the message before it has ended. If it was measured that allgathers overlap, the next
one starts earlier. Messages are decoded after backward, in order. For payloads that need no
encoding this is the published model:

    tau_c(first) = R(first),  tau_c(next) = max(tau_c + t_c, R(next)),
    step = t_f + tau_c(last) + t_c(last) + t_u,

where R(l) is the time in seconds from the start of backward until the gradient of layer l is ready.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import is_number
from deepreduce_hvd.communicators.bucket import label_of
from deepreduce_hvd.schedule.costs import COMMUNICATORS
from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.merge import optimal_merge
from deepreduce_hvd.schedule.profile import Profile

#: How a message travels: uncompressed, as float16, or as payloads of the profile's codec.
DENSE, FP16, CODEC = "dense", "fp16", "codec"
WAYS = (DENSE, FP16, CODEC)
COMPUTE, NETWORK = "compute", "network"
#: what threads encode while backward goes on
THREADS = "encoding threads"
#: in measured timelines only: the thread that decodes under torch.distributed
EXCHANGES = "exchange thread"
#: what the device does in a step, and the wait for the network, in the order of a step
KINDS = ("forward", "backward", "encode", "network", "decode", "update")
BYTES = {DENSE: 4, FP16: 2}  # per element
_OF_PAYLOADS = tuple(name for name in COMMUNICATORS if name != "Allreduce")


@dataclasses.dataclass(frozen=True)
class Event:
    """One bar of a timeline; ``start`` and ``end`` in seconds from the start of the step."""

    track: str
    kind: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The events of a step.

    Attributes:
        events: the events of the tracks "compute", "network" and "encoding threads".
        step_seconds: the end of the step.
    """

    events: tuple[Event, ...]
    step_seconds: float

    def waits(self) -> dict[str, float]:
        """Return the seconds of a step by cause; they add up to the step.

        The causes are :data:`KINDS`. "network" is the time in which the device waits for messages.
        If it waits while threads encode and no message is under way, this counts as "encode".
        """
        seconds = dict.fromkeys(KINDS, 0.0)
        for event in self.events:
            if event.track == COMPUTE:
                seconds[event.kind] += event.end - event.start
        idle = max(self.step_seconds - sum(seconds.values()), 0.0)
        spans = {
            track: [(event.start, event.end) for event in self.events if event.track == track]
            for track in (COMPUTE, NETWORK, THREADS)
        }
        others = spans[COMPUTE] + spans[NETWORK]
        encoding = min(_covered(others + spans[THREADS]) - _covered(others), idle)
        seconds["encode"] += encoding
        seconds["network"] = idle - encoding
        return seconds


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that at least one of several (start, end) spans covers."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a schedule.

    Attributes:
        members: the names of its parameters, in the order in which gradients are ready.
        way: how it is sent: "dense", "fp16" (converted to float16), or "codec" (encoded).
        density: the share of elements that the codec keeps; None without the codec.
        communicator: how payloads become a sum, "Allreduce" without the codec.
    """

    members: tuple[str, ...]
    way: str = DENSE
    density: float | None = None
    communicator: str = "Allreduce"

    def __post_init__(self) -> None:
        good = isinstance(self.members, tuple) and bool(self.members)
        good = good and all(isinstance(name, str) for name in self.members)
        expect(good, "message members", "a tuple of names of parameters", self.members)
        expect(self.way in WAYS, "message way", f"one of {', '.join(WAYS)}", repr(self.way))
        if self.way == CODEC:
            given: Any = self.density
            good = is_number(given) and 0 < given <= 1
            expect(good, "message density", "a number in (0, 1]", repr(given))
            object.__setattr__(self, "density", float(given))  # JSON has no float32
            expect(
                self.communicator in _OF_PAYLOADS,
                "message codec",
                f"a communicator for payloads, one of {', '.join(_OF_PAYLOADS)}",
                repr(self.communicator),
            )
        else:
            expect(
                self.density is None and self.communicator == "Allreduce",
                f"message {self.way}",
                "no density, and Allreduce",
                f"{self.density!r} and {self.communicator}",
            )

    @property
    def label(self) -> str:
        """A short text: the first and the last member, and how it is sent."""
        names = label_of(self.members)
        if self.density is None:
            return f"{names}, {self.way}"
        return f"{names}, {100 * self.density:.3g} % {self.communicator}"


class Model:
    """The costs of a profile's messages on a network. Parameters are numbered in ready order."""

    def __init__(self, profile: Profile, network: Network) -> None:
        self.profile = profile
        self.network = network
        parts = profile.parameters
        self.names = tuple(part.name for part in parts)
        self.ready = np.array([part.ready_seconds for part in parts])
        self.elements = np.array([part.elements for part in parts], dtype=np.float64)
        self.encode = np.array([part.encode_seconds for part in parts])
        self.decode = np.array([part.decode_seconds for part in parts])
        points = [np.array(part.payload_points()) for part in parts]
        # payloads are piecewise linear in the density, so those of a message are too
        self._densities = np.unique(np.concatenate([rows[:, 0] for rows in points]))
        payloads = np.array([np.interp(self._densities, *rows.T) for rows in points])
        self._payload_sums = np.concatenate(
            [np.zeros((1, self._densities.size)), np.cumsum(payloads, axis=0)]
        )
        self._element_sums = np.concatenate([[0.0], np.cumsum(self.elements)])
        self._decode_sums = np.concatenate([[0.0], np.cumsum(self.decode)])

    @property
    def count(self) -> int:
        """The number of parameters."""
        return self.ready.size

    def preparation(
        self, way: str, density: float | None, first: int = 0, last: int | None = None
    ) -> np.ndarray:
        """Return the seconds that prepare each of some gradients for sending.

        Args:
            way: one of :data:`WAYS`.
            density: the density of the codec; None for the other ways.
            first, last: the gradients ``first`` to ``last`` - 1. Default: all.
        """
        elements = self.elements[first:last]
        if density is None:
            return (self.profile.to_fp16_seconds if way == FP16 else 0.0) * elements
        more = self.profile.seconds_per_kept_element * (density - self.profile.density)
        return np.maximum(self.encode[first:last] + more * elements, 0.0)

    def prepared(self, way: str, density: float | None) -> np.ndarray:
        """Return (L,) when each gradient can be sent, if all of them travel in the same way."""
        seconds = np.cumsum(self.preparation(way, density))
        if way != CODEC:
            return self.ready + seconds
        before = np.concatenate([[0.0], seconds[:-1]])
        computed = self.ready + self.profile.encoding_delay * before
        # a thread encodes the gradients in order, each when it is ready
        return seconds + np.maximum.accumulate(computed - before)

    def alone(self, way: str, density: float | None, first: int, last: int) -> np.ndarray:
        """Return when groups of gradients can be sent that start at each of some gradients.

        Group i has the gradients ``first`` + i to ``last`` - 1. No gradient before it is prepared.

        Args:
            way, density, first, last: as for :meth:`preparation`.

        Returns:
            (``last`` - ``first``,) seconds from the start of backward.
        """
        seconds = self.preparation(way, density, first, last)
        ready = self.ready[first:last]
        left = seconds[::-1].cumsum()[::-1]
        if way != CODEC:
            return ready[-1] + left
        delay = self.profile.encoding_delay
        # max over j of ready[j] + delay * (sum from the first to j - 1) + (sum from j on)
        latest = np.maximum.accumulate((ready + (1 - delay) * left)[::-1])[::-1]
        return latest + delay * left

    def payload(self, first: int, last: int, density: float) -> float:
        """Return the bytes of the payloads of parameters ``first`` to ``last`` - 1."""
        sums = self._payload_sums[last] - self._payload_sums[first]
        return float(np.interp(density, self._densities, sums))

    def payloads(self, density: float) -> np.ndarray:
        """Return (L,) the bytes of each parameter's payload."""
        sums = [float(np.interp(density, self._densities, row)) for row in self._payload_sums]
        return np.diff(sums)

    def density_of(self, first: int, last: int, payload: float) -> float:
        """Return the largest density whose payloads have at most ``payload`` bytes, 0 if none."""
        sums = self._payload_sums[last] - self._payload_sums[first]
        if payload < sums[0]:
            return 0.0
        return float(np.interp(payload, sums, self._densities))

    def size(self, first: int, last: int, way: str) -> float:
        """Return the bytes of a tensor that is sent uncompressed or as float16."""
        return float(BYTES[way] * (self._element_sums[last] - self._element_sums[first]))

    def seconds(
        self, first: int, last: int, way: str, density: float | None, communicator: str
    ) -> float:
        """Return the seconds of the message of parameters ``first`` to ``last`` - 1."""
        if density is None:
            return float(self.network.allreduce(self.size(first, last, way), way == FP16))
        elements = float(self._element_sums[last] - self._element_sums[first])
        payload = self.payload(first, last, density)
        return self.network.exchange(communicator, density * elements, elements, payload)

    def occupied(
        self, first: int, last: int, way: str, density: float | None, communicator: str
    ) -> float:
        """Return the seconds of this message until the next one can start; as :meth:`seconds`."""
        if density is not None and communicator == "Allgather":
            return float(self.network.gather_occupied(self.payload(first, last, density)))
        return self.seconds(first, last, way, density, communicator)

    def decode_seconds(
        self, first: int, last: int, way: str, density: float | None, communicator: str
    ) -> float:
        """Return the seconds of decoding a message.

        For payloads they grow with the bytes that a rank decodes: its own payload and all that it
        receives. float16 is converted back.
        """
        if way == FP16:
            elements = self._element_sums[last] - self._element_sums[first]
            return float(self.profile.from_fp16_seconds * elements)
        seconds = float(self._decode_sums[last] - self._decode_sums[first])
        if density is None or seconds == 0:
            return 0.0
        payload = self.payload(first, last, density)
        base = self.payload(first, last, self.profile.density)
        elements = float(self._element_sums[last] - self._element_sums[first])
        received = self.network.received(communicator, density * elements, elements, payload)
        return seconds * (payload + received) / base

    def optimal_grouping(self, way: str, density: float) -> list[int]:
        """Return the grouping whose last message ends first, if all messages use the same way."""
        ready = self.prepared(way, density if way == CODEC else None)
        if way == CODEC:
            return optimal_merge(ready, self.payloads(density), self.network.gather_occupied)[0]
        sizes = np.array([self.size(layer, layer + 1, way) for layer in range(self.count)])

        def seconds_of(size: Any) -> Any:
            return self.network.allreduce(size, way == FP16)

        return optimal_merge(ready, sizes, seconds_of)[0]

    def selection_per_step(self) -> float:
        """Return the factor s of OMGS' selection cost s x log2(x), from the encoding times."""
        steps = float((self.elements * np.log2(np.maximum(self.elements, 2))).sum())
        return float(self.encode.sum()) / steps


def positions(profile: Profile, messages: Iterable[Message]) -> list[int]:
    """Return the boundaries of messages: 0, the end of the first, of the second, and so on.

    Raises:
        InvalidArgumentError: the messages are not the profile's parameters in their order.
    """
    bounds: list[int] = [0]
    names: list[str] = []
    for message in messages:
        names += message.members
        bounds.append(len(names))
    expected = [part.name for part in profile.parameters]
    expect(
        names == expected,
        "messages",
        "every parameter of the profile once, in the order in which gradients are ready",
        "others" if sorted(names) != sorted(expected) else "another order",
    )
    return bounds


def timeline(
    profile: Profile,
    network: Network,
    messages: Iterable[Message],
    *,
    overlap: bool = True,
    merged_selection: bool = False,
) -> Timeline:
    """Return the timeline of a step.

    Args:
        profile: the profile.
        network: the network.
        messages: the messages, in order.
        overlap: False sends only after backward.
        merged_selection: True selects each message as one tensor, when its last gradient is
            computed, in s x log2(x) seconds on the device (OMGS). The default encodes every
            gradient when it is computed.

    Returns:
        The predicted :class:`Timeline`.

    Raises:
        InvalidArgumentError: the messages are not the parameters of the profile in their order, or
            a message has another density than a codec without a ratio sends.
    """
    model, messages = Model(profile, network), tuple(messages)
    bounds = positions(profile, messages)
    if not profile.has_ratio:
        what = f"the density {profile.density:g}, which no plan can change for {profile.codec}"
        for message in messages:
            good = message.density in (None, profile.density)
            expect(good, f"message {message.label}", what, message.density)
    events: list[Event] = []

    def bar(track: str, kind: str, name: str, start: float, seconds: float) -> float:
        if seconds > 0:
            events.append(Event(track, kind, name, start, start + seconds))
        return start + seconds

    per_step = model.selection_per_step()
    clock = bar(COMPUTE, "forward", "forward", 0.0, profile.forward_seconds)
    computed, encoder, ready = 0.0, 0.0, []
    for message, first, last in zip(messages, bounds, bounds[1:]):
        encoded = message.way == CODEC
        preparation = model.preparation(message.way, message.density, first, last).tolist()
        for layer, seconds in zip(range(first, last), preparation):
            name, at = model.names[layer], float(model.ready[layer])
            clock = bar(COMPUTE, "backward", name, clock, at - computed)
            computed = at
            if not encoded:
                clock = bar(COMPUTE, "encode", name, clock, seconds)
            elif not merged_selection:
                delay = profile.encoding_delay
                if delay < 1:
                    encoder = bar(THREADS, "encode", name, max(encoder, clock), seconds)
                clock = bar(COMPUTE, "encode", name, clock, delay * seconds)
        if encoded and merged_selection:
            total = float(model.elements[first:last].sum())
            seconds = per_step * total * float(np.log2(max(total, 2)))
            clock = bar(COMPUTE, "encode", message.label, clock, seconds)
        ready.append(max(encoder, clock) if encoded else clock)
    free, ends = 0.0 if overlap else max(clock, encoder), []
    for message, first, last, at in zip(messages, bounds, bounds[1:], ready):
        how = message.way, message.density, message.communicator
        start, seconds = max(free, at), model.seconds(first, last, *how)
        ends.append(bar(NETWORK, "exchange", message.label, start, seconds))
        free = start + model.occupied(first, last, *how)
    for message, first, last, end in zip(messages, bounds, bounds[1:], ends):
        how = message.way, message.density, message.communicator
        seconds = model.decode_seconds(first, last, *how)
        clock = bar(COMPUTE, "decode", message.label, max(clock, end), seconds)
    step = bar(COMPUTE, "update", "update", clock, profile.update_seconds)
    return Timeline(tuple(events), step)
