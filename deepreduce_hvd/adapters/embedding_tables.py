"""Embedding tables among the parameters, which need another codec than the default.

A batch uses few rows of a table, and the gradient of all other rows is zero. Error feedback delays
rows that are seldom used, which costs accuracy (docs/accuracy.md). So a compressor looks at the
first gradients and warns.
"""

import math
from collections.abc import Iterable
from typing import Any

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.policies import ROWS, Policy, rows_codec
from deepreduce_hvd.schedule.dag import DENSE
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.stages.sparsifiers import Threshold

_MOST_NAMES = 5


def may_be(shape: tuple[int, ...], policy: Policy) -> bool:
    """Return whether a parameter could be an embedding table whose rows are delayed."""
    if len(shape) != 2 or policy.codec is None or not policy.delays:
        return False
    sparsifier, elements = policy.codec.sparsifier, math.prod(shape)
    if isinstance(sparsifier, Threshold) and sparsifier.keeps_all:
        return False
    return sparsifier.most_selected(elements, sparsifier.schedule_steps) != elements


def is_table(used: int, rows: int) -> bool:
    """Return whether a gradient with ``used`` rows that are not zero is that of a table.

    With more used rows, the codec "rows" saves less, and other layers have such gradients too: the
    first layer of a network gets zeros for pixels that are black in all images of a batch.
    """
    return 0 < 4 * used < rows


def warning(names: Iterable[str], compressor: Any) -> str:
    """Return the warning about the tables of a compressor with these names."""
    listed = list(names)
    way, effect = ROWS, "send all used rows in each step"
    if not _can_have_rows(compressor):
        way, effect = DENSE, "send them uncompressed"
    shown = ", ".join(listed[:_MOST_NAMES])
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    patterns = ", ".join(f'"{_literal(name)}": "{way}"' for name in listed[:_MOST_NAMES])
    return (
        f"the gradient of {shown}{more} is zero in most rows, as that of an embedding table. Error"
        f" feedback delays rows that are seldom used, which costs accuracy. To {effect}, write"
        f" dr.Compressor({{{patterns}}}, parameters=...)"
    )


def _can_have_rows(compressor: Any) -> bool:
    """Return whether a compressor accepts the codec "rows" for some of its parameters."""
    try:
        compressor.communicator.check(rows_codec(), NoMemory())
    except InvalidArgumentError:
        return False
    return compressor.schedule is None  # plans need one codec


def _literal(name):
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
