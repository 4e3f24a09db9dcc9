"""Common checks of arguments."""

import numbers
from typing import TypeGuard

from deepreduce_hvd.errors import InvalidArgumentError


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number of Python or NumPy; bool does not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of Python or NumPy; bool does not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def expect_keys(**keys):
    """Raise InvalidArgumentError unless each argument is an integer in [0, 2^63)."""
    for name, value in keys.items():
        if not is_integer(value) or not 0 <= value < 2**63:
            raise InvalidArgumentError(f"{name}: expected an integer in [0, 2^63), got {value!r}")
