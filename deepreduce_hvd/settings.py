"""Common checks of arguments, and how to show them."""

import inspect
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


def changed(kind, instance, names):
    """Return the attributes that differ from the constructor's defaults, as text: ``, name=value``.

    Args:
        kind: the class whose constructor has the defaults.
        instance: the object that has the attributes.
        names: their names, which are those of the constructor's arguments.
    """
    defaults = inspect.signature(kind).parameters
    values = {name: getattr(instance, name) for name in names}
    return "".join(
        f", {name}={_text_of(value)}"
        for name, value in values.items()
        if value is not defaults[name].default and value != defaults[name].default
    )


def _text_of(value):
    """Return a value as text without an address in memory."""
    texts = (text for text in (repr(value), str(value)) if " at 0x" not in text)
    return next(texts, f"<{type(value).__name__}>")
