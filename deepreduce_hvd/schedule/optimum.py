"""The plan with the shortest predicted step."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepreduce_hvd.schedule import dag
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16, WAYS, Message, Model
from deepreduce_hvd.schedule.density import lags, largest_good
from deepreduce_hvd.schedule.fields import expect
from deepreduce_hvd.schedule.grouping import FloatArray, IndexArray, checked_grouping
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.merge import pareto_paths
from deepreduce_hvd.schedule.plan import COMMUNICATORS, Plan, kept_share
from deepreduce_hvd.schedule.profile import Profile, least_density

_SIZES = 64  # of messages at which communicators are compared
_STATES = 32  # pairs of clocks that the program keeps per prefix of the gradients
_EQUAL = 1 + 1e-9  # steps within this ratio count as equal, and the denser plan is taken


def optimal_plan(
    profile: Profile,
    network: Network,
    *,
    density: float | None = None,
    ways: Sequence[str] = WAYS,
    communicators: Sequence[str] = COMMUNICATORS,
    groups: Sequence[int] | None = None,
) -> Plan:
    """Return the plan with the shortest predicted step, and of equal ones the densest.

    A dynamic program over pairs of clocks chooses the grouping, and how each message is sent
    (:func:`~deepreduce_hvd.schedule.merge.pareto_paths`). Its results compete with everything
    uncompressed, everything as float16, everything encoded (each in its optimal grouping) and LAGS.
    Then densities are raised as far as the step does not become longer.

    In the model, the plan is never slower than any of these, and no single message could be denser
    without a longer step. The program keeps at most 32 pairs of clocks per gradient. If that is
    enough, decoding takes no time and only Allgather is used, then no other grouping and choice of
    ``ways`` at this density is faster. If threads encode, conversion to float16 must also take no
    time; and allgathers must not overlap. If encoding delays backward in part, the program's clocks
    are approximate.

    Args:
        profile: the profile.
        network: the network.
        density: the smallest density of the codec. Default: that of the profile, the only one for a
            codec without a ratio.
        ways: how messages may be sent, some of "dense", "fp16" and "codec". Without "codec",
            nothing is sparsified.
        communicators: the communicators that may be used for payloads.
        groups: lengths of the groups of consecutive parameters that share a message, if something
            else decides that, as PyTorch's DDP does. LAGS does not compete then. Default: the plan
            chooses.

    Returns:
        The plan, with its predicted timeline.

    Raises:
        InvalidArgumentError: an unknown value in ``ways`` or ``communicators``, empty ``ways``, no
            Allgather, a density outside of (0, 1] or one for a codec without a ratio, or groups
            that do not add up to the number of parameters.
    """
    ways, communicators = tuple(ways), tuple(communicators)
    for way in ways:
        expect(way in WAYS, "optimal_plan ways", f"some of {', '.join(WAYS)}", repr(way))
    expect(bool(ways), "optimal_plan ways", "at least one", "none")
    least = least_density(profile, density, "optimal_plan density")
    for name in communicators:
        good = name in COMMUNICATORS
        expect(good, "optimal_plan communicators", f"some of {', '.join(COMMUNICATORS)}", name)
    expect(
        "Allgather" in communicators,
        "optimal_plan communicators",
        "Allgather among them",
        communicators,
    )
    model = Model(profile, network)
    if groups is not None:
        groups = checked_grouping("optimal_plan groups", groups, model.count)
    choices = _Choices(model, least, communicators, groups)
    allowed = [way for way in WAYS if way in ways]
    candidates = [choices.grouped(way) for way in allowed]
    if profile.encoding_delay > 0:
        candidates += choices.mixed(allowed, by_threads=False)
    if profile.encoding_delay < 1:
        candidates += choices.mixed(allowed, by_threads=True)
    if groups is None and set(ways) >= {DENSE, CODEC}:
        for hide_behind in ("next", "rest"):
            candidates.append(
                lags(profile, network, max_compression=1 / least, hide_behind=hide_behind)
            )
    elements = dict(zip(model.names, model.elements.tolist()))
    steps = [_Clocks(model, messages).step_seconds() for messages in candidates]
    fastest = [messages for messages, step in zip(candidates, steps) if step <= min(steps) * _EQUAL]
    best = max(fastest, key=lambda messages: kept_share(messages, elements))
    return Plan.of(profile, network, _filled(model, best, allowed))


class _Choices:
    """Groupings and ways of a model's parameters at one density."""

    def __init__(
        self,
        model: Model,
        density: float,
        communicators: tuple[str, ...],
        groups: Sequence[int] | None,
    ) -> None:
        self.model = model
        self.density = density
        self.groups = groups
        # end of a message -> its only start, if the groups are given
        ends = np.cumsum(groups).tolist() if groups is not None else []
        self.starts = dict(zip(ends, [0, *ends]))
        self.payloads = model.payloads(density)
        self.before = {
            way: np.concatenate(
                [[0.0], np.cumsum(model.preparation(way, density if way == CODEC else None))]
            )
            for way in WAYS
        }
        # Seconds of each communicator by elements of a message, at the average payload per element.
        # An Allgather is computed exactly; with 2 ranks it is always the fastest.
        total = float(model.elements.sum())
        self.sizes = np.geomspace(1, total, _SIZES)
        share = float(self.payloads.sum()) / total
        others = [name for name in communicators if name != "Allgather"]
        self.curves = {
            name: np.array(
                [model.network.exchange(name, density * n, n, share * n) for n in self.sizes]
            )
            for name in (others if model.network.ranks > 2 else [])
        }

    def messages(self, path: Sequence[tuple[int, str]]) -> list[Message]:
        """Return the messages of (length, way) pairs, each with the fastest communicator."""
        made, first = [], 0
        for length, way in path:
            last = first + length
            members = self.model.names[first:last]
            if way == CODEC:
                names = ("Allgather", *self.curves)
                how = [(first, last, way, self.density, name) for name in names]
                seconds = [
                    self.model.seconds(*one) + self.model.decode_seconds(*one) for one in how
                ]
                communicator = names[int(np.argmin(seconds))]
                made.append(Message(members, way, self.density, communicator))
            else:
                made.append(Message(members, way))
            first = last
        return made

    def grouped(self, way: str) -> list[Message]:
        """Return the optimal grouping if all messages travel in the same way."""
        grouping = self.groups
        if grouping is None:
            grouping = self.model.optimal_grouping(way, self.density)
        return self.messages([(length, way) for length in grouping])

    def mixed(self, ways: Sequence[str], *, by_threads: bool) -> list[list[Message]]:
        """Return the groupings, with a way for each message, that may give the shortest step.

        The first clock is how long preparation has delayed backward so far. A message does not wait
        for threads that encode the one before. With ``by_threads``, this clock is when the threads
        have encoded the last gradient. Backward is then delayed as if all gradients were encoded,
        and conversions to float16 delay only their own message.
        """
        model, network = self.model, self.model.network
        delay = model.profile.encoding_delay
        delays = delay * self.before[CODEC] if by_threads else np.zeros(model.count + 1)
        payload_sums = np.concatenate([[0.0], np.cumsum(self.payloads)])
        element_sums = np.concatenate([[0.0], np.cumsum(model.elements)])

        def advance(
            start: IndexArray, encoded: FloatArray, finish: FloatArray, end: int
        ) -> list[tuple[FloatArray, FloatArray]]:
            elements = element_sums[end] - element_sums[:end]
            results = []
            following = model.ready[min(end, model.count - 1)]
            for way in ways:
                preparation = self.before[way][end] - self.before[way][:end]
                alone = model.alone(way, self.density if way == CODEC else None, 0, end)
                ready = (alone + delays[:end])[start]
                if not by_threads:
                    ready = ready + encoded
                    share = delay if way == CODEC else 1.0
                    after = encoded + share * preparation[start]
                    next_ready = following + after
                else:
                    after, next_ready = encoded, following + delays[end]
                    if way == CODEC:
                        ready = after = np.maximum(encoded + preparation[start], ready)
                    after = np.maximum(after, next_ready)  # states that do not differ coincide
                if way == CODEC:
                    seconds = network.gather_occupied(payload_sums[end] - payload_sums[:end])
                    for curve in self.curves.values():
                        seconds = np.minimum(seconds, np.interp(elements, self.sizes, curve))
                else:
                    size = elements * dag.BYTES[way]
                    seconds = network.allreduce(size, way == FP16)
                seconds = np.broadcast_to(seconds, elements.shape)
                ends = np.maximum(finish, ready) + seconds[start]
                if self.groups is not None:
                    ends[start != self.starts.get(end, -1)] = np.inf
                # no later message starts before the next gradient is ready, so states can coincide
                results.append((after, np.maximum(ends, next_ready)))
            return results

        return [
            self.messages([(length, ways[way]) for length, way in path])
            for path, _, _ in pareto_paths(model.count, advance, _STATES)
        ]


class _Clocks:
    """The clocks of :func:`dag.timeline` without its events, for many changes of messages."""

    def __init__(self, model: Model, messages: Sequence[Message]) -> None:
        self.model = model
        self.messages = list(messages)
        self.bounds = dag.positions(model.profile, messages)
        self.rows = [self._row(number, message) for number, message in enumerate(messages)]

    def _row(self, number: int, message: Message) -> "_Row":
        first, last = self.bounds[number : number + 2]
        model = self.model
        how = message.way, message.density, message.communicator
        preparation = float(model.preparation(message.way, message.density, first, last).sum())
        encoded = message.way == CODEC
        return _Row(
            preparation * (model.profile.encoding_delay if encoded else 1.0),
            preparation if encoded else 0.0,
            float(model.alone(message.way, message.density, first, last)[0]),
            model.seconds(first, last, *how),
            model.occupied(first, last, *how),
            model.decode_seconds(first, last, *how),
        )

    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        model = self.model
        delay, encoder, free, ends = 0.0, 0.0, 0.0, []
        for row in self.rows:
            ready = row.alone + delay
            if row.encoding:
                encoder = ready = max(encoder + row.encoding, ready)
            delay += row.device
            start = max(free, ready)
            ends.append(start + row.exchange)
            free = start + row.occupied
        clock = float(model.ready[-1]) + delay
        for end, row in zip(ends, self.rows):
            clock = max(clock, end) + row.decode
        return model.profile.forward_seconds + clock + model.profile.update_seconds

    def fits(self, number: int, message: Message, limit: float) -> bool:
        """Put a message in place of another; keep it if the step is at most ``limit`` seconds."""
        before = self.messages[number], self.rows[number]
        self.messages[number], self.rows[number] = message, self._row(number, message)
        if self.step_seconds() <= limit:
            return True
        self.messages[number], self.rows[number] = before
        return False


class _Row(NamedTuple):
    """Seconds of one message.

    Attributes:
        device: the delay of backward by preparation.
        encoding: encoding, by threads or by the device.
        alone: when the message can be sent if nothing before it is prepared, from the start of
            backward.
        exchange: of the message.
        occupied: of the message until the next one can start.
        decode: decoding.
    """

    device: float
    encoding: float
    alone: float
    exchange: float
    occupied: float
    decode: float


def _filled(model: Model, messages: Sequence[Message], ways: Sequence[str]) -> list[Message]:
    """Return the messages, as dense as they can be without a longer step.

    First, messages that hide entirely are sent uncompressed or as float16. Then all others get the
    largest common density, then each the largest one for itself, in order.
    """
    clocks = _Clocks(model, messages)
    limit = clocks.step_seconds() * (1 + 1e-12)  # rounding
    changed = True
    while changed:  # a small message can be shorter uncompressed, and leave time for others
        changed = False
        for better in (DENSE, FP16):
            for number, message in enumerate(clocks.messages):
                worse = message.way != better and message.way != DENSE
                if better in ways and worse:
                    found = Message(message.members, better)
                    changed |= clocks.fits(number, found, limit)
    encoded = [number for number, one in enumerate(clocks.messages) if one.way == CODEC]
    most = model.profile.max_density
    if encoded:
        least = min(clocks.messages[number].density or 0.0 for number in encoded)

        def all_fit(density: float) -> bool:
            raised = [
                max(message, _denser(message, density), key=lambda one: one.density or 0.0)
                if message.way == CODEC
                else message
                for message in clocks.messages
            ]
            return _Clocks(model, raised).step_seconds() <= limit

        common = largest_good(least, max(most, least), all_fit)
        for number in encoded:
            message = clocks.messages[number]
            if common > (message.density or 0.0):
                clocks.fits(number, _denser(message, common), limit)
    for number in encoded:
        message = clocks.messages[number]

        def fits(density: float, number: int = number, message: Message = message) -> bool:
            return clocks.fits(number, _denser(message, density), limit)

        density = message.density or 0.0
        largest_good(density, max(most, density), fits)
    return clocks.messages


def _denser(message: Message, density: float) -> Message:
    return dataclasses.replace(message, density=density)
