"""Let one compressor of a process measure and try plans at a time.

Two that started together would always try their plans in the same steps, so each would measure the
plans of the other one too.
"""

import weakref
from typing import Any

_holder: weakref.ref[Any] | None = None


def is_busy(own: object) -> bool:
    """Return whether another scheduler than ``own`` is measuring or trying plans."""
    other = None if _holder is None else _holder()
    return other is not None and other is not own


def take(own: object) -> None:
    """Note that ``own`` measures and tries plans from now on."""
    global _holder
    _holder = weakref.ref(own)


def give_back(own: object) -> None:
    """Note that ``own`` no longer does."""
    global _holder
    if not is_busy(own):
        _holder = None
