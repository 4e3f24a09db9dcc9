"""Let one compressor of a process measure and try plans at a time.

Two that started together would always try their plans in the same steps, so each would measure the
plans of the other one too.
"""

import weakref
from typing import Any

_holder: weakref.ref[Any] | None = None
_steps = 0


def steps() -> int:
    """Return a number that grows when a scheduler begins to try plans, and with its steps."""
    return _steps


def step_ends(own: object) -> None:
    """Note that a step of ``own`` has ended."""
    global _steps
    if _holder is not None and _holder() is own:
        _steps += 1


def is_busy(own: object, since: int) -> bool:
    """Return whether another scheduler than ``own`` is measuring or trying plans.

    Args:
        own: a scheduler.
        since: what :func:`steps` returned some steps ago. One that took no step since then may no
            longer be used, and does not count.
    """
    other = None if _holder is None else _holder()
    return other is not None and other is not own and _steps != since


def take(own: object) -> None:
    """Note that ``own`` measures and tries plans from now on."""
    global _holder, _steps
    _holder = weakref.ref(own)
    _steps += 1


def give_back(own: object) -> None:
    """Note that ``own`` no longer does."""
    global _holder
    if _holder is not None and _holder() is own:
        _holder = None
