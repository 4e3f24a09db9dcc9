"""Check custom stages before they are used."""

from inspect import getattr_static

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import (
    IndexCodec,
    Memory,
    Sparsifier,
    ValueCodec,
    is_built_in,
    overrides,
)
from deepreduce_hvd.stages.registry import registered

#: {kind of stage: methods that a custom stage must have}
_NEEDED = {
    Sparsifier: ("select",),
    IndexCodec: ("encode", "decode"),
    ValueCodec: ("encode", "decode"),
    Memory: ("accumulate", "update"),
}


def expect_usable(stage):
    """Raise InvalidArgumentError for a custom stage that lacks something that it needs."""
    if is_built_in(stage):
        return
    name = type(stage).__name__
    kind, needed = next(
        (kind, needed) for kind, needed in _NEEDED.items() if isinstance(stage, kind)
    )
    missing = [method for method in needed if not overrides(stage, kind, method)]
    if missing:
        raise InvalidArgumentError(
            f"{name}: expected the methods {' and '.join(needed)}, got no "
            f"{' and no '.join(missing)}"
        )
    expect_same_text(name, stage)
    for attribute, value in vars(stage).items():
        found = _unsuitable_in(value)
        if found is not None:
            if isinstance(found, (set, frozenset)):
                hint = "write a sorted tuple, because the order of a set differs between ranks"
            elif found is value:
                hint = f"write {attribute}.tolist()"
            else:
                hint = "write .tolist() of it"
            raise InvalidArgumentError(
                f"{name}.{attribute}: expected numbers, strings, tuples, lists or dictionaries,"
                f" got {type(found).__name__}; {hint}"
            )
    if kind is Memory:
        _expect_names(name, stage.state)
    elif kind is not Sparsifier:
        _expect_codec(name, stage, registered(kind))


def expect_same_text(what, value):
    """Raise InvalidArgumentError if the text of a value, which ranks compare, has an address."""
    if " at 0x" in repr(value):
        raise InvalidArgumentError(
            f"{what}: expected attributes with a repr that is the same on all ranks, such as"
            f" numbers, got {value!r}"
        )


def _unsuitable_in(value):
    """Return the first array, tensor or set in a value, or None.

    The text of an array leaves out elements, and that of a set depends on the process.
    """
    if isinstance(value, (set, frozenset)):
        return value
    if hasattr(value, "dtype") and getattr(value, "shape", None):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for found in map(_unsuitable_in, value) if found is not None), None)


def _expect_names(name, names):
    if (
        not isinstance(names, tuple)
        or not all(isinstance(one, str) and one for one in names)
        or len(set(names)) < len(names)
    ):
        raise InvalidArgumentError(
            f"{name}.state: expected a tuple of distinct names, got {names!r}"
        )


def _expect_codec(name, codec, known):
    # receivers find the class by its id, and have no instance
    if not isinstance(getattr_static(type(codec), "decode"), (classmethod, staticmethod)):
        raise InvalidArgumentError(
            f"{name}.decode: expected a class method, got an ordinary one; write @classmethod above"
            " def decode(cls, ...)"
        )
    taken = known.get(codec.stage_id)
    if taken is not type(codec):
        raise InvalidArgumentError(
            (
                f"{name}: expected a class with its own stage_id, registered with "
                f"@dr.register, got stage_id {codec.stage_id!r}, "
            )
            + ("which is not registered" if taken is None else f"which belongs to {taken.__name__}")
        )
