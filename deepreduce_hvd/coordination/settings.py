"""What ranks compare in the handshake: settings by name."""

import hashlib
from typing import NamedTuple

from deepreduce_hvd.coordination.handshake_messages import short


class Setting(NamedTuple):
    """A setting that ranks compare.

    Attributes:
        name: name of the setting.
        value: a text, or a list of lines. Of a list, the error message shows the first line that
            differs.
        warning: None if ranks must have equal values. Otherwise, what the first rank warns of if
            they do not, with ``{ranks}`` for those that differ from it.
    """

    name: str
    value: str | list[str]
    warning: str | None = None

    @property
    def digest(self):
        text = self.value if isinstance(self.value, str) else "\n".join(self.value)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    @property
    def shown(self):
        return short(self.value) if isinstance(self.value, str) else f"{len(self.value)} of them"


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
