"""Checks of values from files. Errors name the place, the expected and the actual value."""

import collections
import json
import os
import pathlib
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import is_integer, is_number
from deepreduce_hvd.errors import InvalidArgumentError

#: the largest integer up to which float64 is exact
_MOST = 2**53


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that float64 can hold, without NaN and infinity."""
    if not is_number(value):
        return False
    exact = value.item() if isinstance(value, np.generic) else value
    return abs(exact) <= sys.float_info.max  # a large integer cannot become a float


def expect(condition: bool, where: str, expected: object, got: object) -> None:
    """Raise InvalidArgumentError unless the condition holds."""
    if not condition:
        shown = got if isinstance(got, str) else reprlib.repr(got)
        raise InvalidArgumentError(f"{where}: expected {expected}, got {shown}")


def expect_keys(
    row: Any, where: str, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Check that ``row`` is a dictionary with all required keys and no unknown ones."""
    expect(isinstance(row, dict), where, "an object with names", row)
    needed, allowed = tuple(required), tuple(optional)
    missing = [key for key in needed if key not in row]
    unknown = sorted(map(str, set(row) - {*needed, *allowed}))
    keys = f"the keys {', '.join(needed or allowed)}"
    if needed and allowed:
        keys += f", and optionally {', '.join(allowed)}"
    expect(not missing, where, keys, f"none named {', '.join(missing)}")
    expect(not unknown, where, keys, f"also {', '.join(unknown)}")


def number_of(row: dict[str, Any], key: str, where: str, least: float = 0.0) -> float:
    """Return a finite number of at least ``least``."""
    value = row[key]
    good = is_finite(value) and value >= least
    expect(good, f"{where} {key}", f"a finite number of at least {least:g}", reprlib.repr(value))
    return float(value) + 0.0  # not -0.0, which is equal but has another text


def integer_of(row: dict[str, Any], key: str, where: str, least: int) -> int:
    """Return an integer of at least ``least``."""
    value = row[key]
    good = is_integer(value) and least <= value <= _MOST
    expect(good, f"{where} {key}", f"an integer of {least} to 2^53", reprlib.repr(value))
    return int(value)


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """Return text that is not empty."""
    value = row[key]
    expect(isinstance(value, str) and bool(value), f"{where} {key}", "text", repr(value))
    return str(value)


def list_of(row: dict[str, Any], key: str, where: str) -> list[Any]:
    """Return a list."""
    value = row[key]
    expect(isinstance(value, list), f"{where} {key}", "a list", repr(value))
    return list(value)


def pairs_of(row: dict[str, Any], key: str, where: str) -> tuple[tuple[float, float], ...]:
    """Return a list or tuple of pairs of finite numbers of at least 0."""
    pairs = row[key]
    expect(isinstance(pairs, (list, tuple)), f"{where} {key}", "a list", repr(pairs))
    for pair in pairs:
        good = isinstance(pair, (list, tuple)) and len(pair) == 2
        good = good and all(is_finite(part) and part >= 0 for part in pair)
        expect(good, f"{where} {key}", "pairs of finite numbers of at least 0", pair)
    return tuple((float(first) + 0.0, float(second) + 0.0) for first, second in pairs)


def set_fields(
    record: Any, where: str, numbers: Iterable[str], integers: Mapping[str, int]
) -> None:
    """Check fields of a frozen dataclass, and set them as float and int.

    So equal records have equal JSON, whatever types their numbers had.

    Args:
        record: the dataclass.
        where: the place for the message.
        numbers: the names of finite numbers of at least 0.
        integers: the names of integers, with the least value of each.
    """
    fields = {key: number_of(vars(record), key, where) for key in numbers}
    fields |= {key: integer_of(vars(record), key, where, least) for key, least in integers.items()}
    for key, value in fields.items():
        object.__setattr__(record, key, value)


def text_of_file(path: str | os.PathLike[str], where: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{where}: expected text in UTF-8, got {error}") from error


def expect_unique(names: Iterable[Any], where: str, what: str) -> None:
    """Raise InvalidArgumentError if a name occurs more than once; ``what`` is their plural."""
    repeated = sorted(str(name) for name, times in collections.Counter(names).items() if times > 1)
    shown = ", ".join(repr(name) for name in repeated)
    expect(not repeated, where, f"unique {what}", f"{shown} more than once")


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    expect_unique([key for key, _ in pairs], where, "keys")
    return dict(pairs)


def json_of(text: str, where: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: expected JSON, got {error}") from error
    except RecursionError as error:
        raise InvalidArgumentError(
            f"{where}: expected JSON, got lists or objects that are nested too deeply"
        ) from error


def parsed(text: str, kind: str, version: int, where: str) -> dict[str, Any]:
    """Return the object of a JSON text with the given format and version."""
    data = json_of(text, where)
    expect(isinstance(data, dict), where, "a JSON object", type(data).__name__)
    expect(data.get("format") == kind, f"{where} format", repr(kind), repr(data.get("format")))
    got = data.get("version")
    expect(is_integer(got) and got == version, f"{where} version", version, repr(got))
    return data
