"""Plan: which gradients share a message, and how each message travels."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepreduce_hvd.communicators.auto import EXACT_SUMS
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import dag
from deepreduce_hvd.schedule.dag import Message
from deepreduce_hvd.schedule.fields import (
    expect,
    expect_keys,
    integer_of,
    list_of,
    number_of,
    parsed,
    text_of,
    text_of_file,
)
from deepreduce_hvd.schedule.links import Network
from deepreduce_hvd.schedule.profile import Profile

#: how a number of parameters is sent, in words
_WORDS = {dag.CODEC: "compressed", dag.DENSE: "uncompressed", dag.FP16: "as float16"}
FORMAT, VERSION = "deepreduce_hvd plan", 1
#: the tracks that a predicted timeline may have
_TRACKS = (dag.COMPUTE, dag.NETWORK, dag.THREADS)
#: the communicators that sum exactly what every rank sends
COMMUNICATORS = tuple(EXACT_SUMS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The messages of a step.

    Attributes:
        messages: the messages, in the order in which they are sent.
        events: the predicted timeline, see :class:`Event`.
        step_seconds: the predicted seconds of a step.
        profile: the SHA-256 of the profile for which the plan was made.
        codec: the codec of the messages that use one, as text.
        hosts: the number of hosts.
        ranks_per_host: the number of ranks of each host.
        link: the name of the link.
    """

    messages: tuple[Message, ...]
    events: tuple[dag.Event, ...]
    step_seconds: float
    profile: str
    codec: str
    hosts: int
    ranks_per_host: int
    link: str

    @classmethod
    def of(cls, profile: Profile, network: Network, messages: Iterable[Message]) -> "Plan":
        """Return the plan of some messages, with its predicted timeline.

        Args:
            profile: the profile of the job.
            network: the network.
            messages: the messages, in the order in which they are sent.

        Returns:
            A :class:`Plan`.

        Raises:
            InvalidArgumentError: the messages are not the parameters of the profile in their order,
                or a message has another density than a codec without a ratio sends.
        """
        ordered = tuple(messages)
        predicted = dag.timeline(profile, network, ordered)
        return cls(
            ordered,
            predicted.events,
            predicted.step_seconds,
            profile.digest(),
            profile.codec,
            network.hosts,
            network.ranks_per_host,
            network.link.name,
        )

    @property
    def timeline(self) -> dag.Timeline:
        """The predicted timeline."""
        return dag.Timeline(self.events, self.step_seconds)

    def kept(self, profile: Profile) -> float:
        """Return the share of the elements of all parameters that one rank sends.

        Args:
            profile: the profile, which has the number of elements of each parameter.

        Returns:
            A number from 0 to 1.
        """
        return kept_share(self.messages, {part.name: part.elements for part in profile.parameters})

    def in_words(self) -> str:
        """Return how many parameters are encoded, at which densities, and how others are sent."""
        parts: list[str] = []
        for way, words in _WORDS.items():
            own = [message for message in self.messages if message.way == way]
            if not own:
                continue
            parameters = sum(len(message.members) for message in own)
            noun = "" if parts else " parameter" if parameters == 1 else " parameters"
            parts.append(f"{parameters}{noun} {words}")
            if way == dag.CODEC:
                shares = sorted({f"{one:.3g}" for one in self.densities().values()}, key=float)
                parts[-1] += (
                    f" in {len(own)} message{'' if len(own) == 1 else 's'} at"
                    f" {'a density' if len(shares) == 1 else 'densities'} of"
                    f" {' to '.join(dict.fromkeys((shares[0], shares[-1])))}"
                )
        return ", ".join(parts) or "no messages"

    def densities(self) -> dict[str, float]:
        """Return {parameter name: share of its elements that is sent} of the encoded messages."""
        return {
            name: message.density
            for message in self.messages
            if message.density is not None
            for name in message.members
        }

    def to_json(self) -> str:
        """Return the plan as JSON text; equal plans give equal text."""
        data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        data["events"] = [list(dataclasses.astuple(event)) for event in self.events]
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan of a JSON text.

        Args:
            text: what :meth:`to_json` returned.

        Returns:
            A :class:`Plan`.

        Raises:
            InvalidArgumentError: the text is not a plan of this version.
        """
        data = parsed(text, FORMAT, VERSION, "plan")
        names = tuple(field.name for field in dataclasses.fields(cls))
        expect_keys(data, "plan", ("format", "version", *names))
        messages = list_of(data, "messages", "plan")
        expect(bool(messages), "plan messages", "at least one", "none")
        return cls(
            tuple(map(_message, messages)),
            tuple(_event(row) for row in list_of(data, "events", "plan")),
            number_of(data, "step_seconds", "plan"),
            text_of(data, "profile", "plan"),
            text_of(data, "codec", "plan"),
            integer_of(data, "hosts", "plan", 1),
            integer_of(data, "ranks_per_host", "plan", 1),
            text_of(data, "link", "plan"),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Args:
            path: path of the file.
        """
        pathlib.Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Return the plan of a JSON file.

        Args:
            path: path of the file.

        Returns:
            A :class:`Plan`.

        Raises:
            InvalidArgumentError: the file is not a plan of this version.
        """
        try:
            return cls.from_json(text_of_file(path, "plan"))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{os.fspath(path)}: {error}") from error


def _message(row: Any) -> Message:
    expect_keys(row, "message", tuple(field.name for field in dataclasses.fields(Message)))
    members = list_of(row, "members", "message")
    density = None if row["density"] is None else number_of(row, "density", "message")
    way, communicator = (text_of(row, key, "message") for key in ("way", "communicator"))
    return Message(tuple(members), way, density, communicator)


def _event(row: Any) -> dag.Event:
    names = [field.name for field in dataclasses.fields(dag.Event)]
    good = isinstance(row, list) and len(row) == len(names)
    expect(good, "plan events", f"lists of {', '.join(names)}", row)
    values = dict(zip(names, row))
    track, kind, name = (text_of(values, key, "event") for key in names[:3])
    expect(track in _TRACKS, "event track", f"one of {', '.join(_TRACKS)}", repr(track))
    good = track != dag.COMPUTE or kind in dag.KINDS
    expect(good, "event kind", f"one of {', '.join(dag.KINDS)}", repr(kind))
    start = number_of(values, "start", name)
    return dag.Event(track, kind, name, start, number_of(values, "end", name, start))


def kept_share(messages: Sequence[Message], elements: Mapping[str, float]) -> float:
    """Return the share of the elements of all messages that one rank sends.

    Args:
        messages: the messages.
        elements: {parameter name: number of its elements}.
    """
    counts = [sum(elements[name] for name in message.members) for message in messages]
    densities = [1.0 if message.density is None else message.density for message in messages]
    sent = sum(density * count for density, count in zip(densities, counts))
    return float(sent) / float(sum(counts))
