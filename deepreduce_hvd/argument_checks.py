"""Common checks of arguments, and how to show them."""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import TypeGuard

from deepreduce_hvd.errors import InvalidArgumentError


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number of Python or NumPy; bool does not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of Python or NumPy; bool does not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def expect_float(what: str, value: object, expected: str, fits: Callable[[float], bool]) -> float:
    """Return a number as a float of Python, with which NumPy computes as the native core does.

    Args:
        what: the name of the setting, for the error message.
        value: what the user gave, such as a float, a NumPy scalar or a Fraction.
        expected: which values are accepted, for the error message.
        fits: a function that returns whether a float is accepted. It must refuse NaN, which stands
            for values of other types.

    Raises:
        InvalidArgumentError: ``value`` is not a number, or it does not fit.
    """
    try:
        number = float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer or a Fraction that no float can hold
        number = math.nan
    if not fits(number):
        raise InvalidArgumentError(f"{what}: expected {expected}, got {value!r}")
    return number


def expect_unset(
    thing: object, name: str, value: object, why: str = "codecs and their stages are immutable"
) -> None:
    """Refuse to change an attribute, because messages and other ranks rely on its first value.

    Args:
        thing, name, value: the arguments of ``__setattr__``.
        why: the reason, for the error message.

    Raises:
        InvalidArgumentError: ``thing`` has an attribute of this name.
    """
    if name in vars(thing):
        kind = type(thing).__name__
        raise InvalidArgumentError(
            f"{kind}.{name}: expected no change, because {why}, got {value!r}; make a new {kind}"
        )


def expect_integer(what: str, value: object, expected: str, fits: Callable[[int], bool]) -> int:
    """Return an integer as an int of Python.

    Args:
        what, value, expected: as for :func:`expect_float`.
        fits: a function that returns whether an integer is accepted.

    Raises:
        InvalidArgumentError: ``value`` is not an integer, or it does not fit.
    """
    if not is_integer(value) or not fits(int(value)):
        raise InvalidArgumentError(f"{what}: expected {expected}, got {value!r}")
    return int(value)


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
