"""Embedding tables among the parameters, which need another codec than the default.

A batch uses few rows of a table, and the gradient of all other rows is zero. Error feedback delays
rows that are seldom used, which costs accuracy (docs/accuracy.md). So a compressor looks at the
first gradients and warns.
"""

from collections.abc import Iterable

from deepreduce_hvd.planning.policies import ROWS, Policy

_MOST_NAMES = 5


def may_be(shape: tuple[int, ...], policy: Policy) -> bool:
    """Return whether a parameter could be an embedding table whose rows are delayed."""
    return len(shape) == 2 and policy.delays


def is_table(used: int, rows: int) -> bool:
    """Return whether a gradient with ``used`` rows that are not zero is that of a table.

    With more used rows, the codec "rows" saves less, and other layers have such gradients too: the
    first layer of a network gets zeros for pixels that are black in all images of a batch.
    """
    return 0 < 4 * used < rows


def warning(names: Iterable[str]) -> str:
    """Return the warning about the tables with these names."""
    listed = list(names)
    shown = ", ".join(listed[:_MOST_NAMES])
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    patterns = ", ".join(f'"{_literal(name)}": "{ROWS}"' for name in listed[:_MOST_NAMES])
    return (
        f"the gradient of {shown}{more} is zero in most rows, as that of an embedding table. Error"
        " feedback delays rows that are seldom used, which costs accuracy. To send all used rows in"
        f" each step, write dr.Compressor({{{patterns}}}, parameters=...)"
    )


def _literal(name):
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
