"""What ranks compare in the handshake: settings by name."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from deepreduce_hvd.coordination.handshake_messages import short
from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.user_warnings import warn


class Setting(NamedTuple):
    """A setting that ranks compare.

    Attributes:
        name: name of the setting.
        value: a text, or a list of lines. Of a list, the error message shows the first line that
            differs.
        if_different: None if ranks must have equal values. Otherwise a function that every rank
            calls if they do not, with the list of those that differ from the first one.
    """

    name: str
    value: str | list[str]
    if_different: Callable[[list[int]], None] | None = None

    @property
    def digest(self):
        text = self.value if isinstance(self.value, str) else "\n".join(self.value)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    @property
    def shown(self):
        return short(self.value) if isinstance(self.value, str) else f"{len(self.value)} of them"


def warns_first_rank(text, transport):
    """Return a function for ``if_different`` that warns on the first rank.

    Args:
        text: the warning, with ``{ranks}`` for the ranks that differ.
        transport: transport between the ranks.
    """

    def if_different(ranks):
        if transport.rank == 0:
            warn(text.format(ranks=ranks_text(ranks)))

    return if_different


def step_counters(slots):
    """Return the setting with the step counter of each parameter.

    Args:
        slots: name of a parameter -> its slot.
    """
    return Setting("steps", [f"{name} at step {slot.steps}" for name, slot in slots.items()])


def known_tables(slots):
    """Return the setting with what is known: which parameters are embedding tables and which not.

    Args:
        slots: name of a parameter -> its slot.
    """
    known = {name: slot.is_table for name, slot in slots.items()}
    return Setting(
        "embedding tables", [f"{name}: {one}" for name, one in known.items() if one is not None]
    )
