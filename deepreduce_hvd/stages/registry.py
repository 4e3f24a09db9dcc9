"""The registry of codecs: which class has which stage id."""

from typing import Any, TypeVar

from deepreduce_hvd.errors import InvalidArgumentError, UnknownCodecError
from deepreduce_hvd.stages.base import IndexCodec, Stage, ValueCodec, is_ours

Registered = TypeVar("Registered", bound=type[Stage])

#: Built-in codecs have ids below this one. Custom codecs have this id or a larger one.
FIRST_USER_ID = 128

_registry: dict[type, dict[int, Any]] = {IndexCodec: {}, ValueCodec: {}}


def register(codec_class: Registered) -> Registered:
    """Register a custom index or value codec, so that payloads can be decoded by its stage id.

    Use it as a class decorator. A class that is defined again, such as by a cell of a notebook,
    replaces the class of the same module, name and id.

    Args:
        codec_class: a subclass of :class:`IndexCodec` or :class:`ValueCodec` with a ``stage_id``
            from 128 to 255 (built-in codecs: 1 to 127).

    Returns:
        ``codec_class``.

    Raises:
        InvalidArgumentError: ``codec_class`` is neither an :class:`IndexCodec` nor a
            :class:`ValueCodec`, its id is not in 128 to 255, or another class has its id or name.
    """
    kinds = codec_class.__mro__ if isinstance(codec_class, type) else ()
    table = next((table for kind, table in _registry.items() if kind in kinds), None)
    if table is None:
        raise InvalidArgumentError(
            f"register: expected an IndexCodec or a ValueCodec, got {codec_class!r}"
        )
    stage_id = codec_class.stage_id
    first, last = (1, FIRST_USER_ID - 1) if is_ours(codec_class) else (FIRST_USER_ID, 255)
    if not isinstance(stage_id, int) or not first <= stage_id <= last:
        raise InvalidArgumentError(
            f"{codec_class.__name__}.stage_id: expected an integer of {first} to {last}, got "
            f"{stage_id!r}"
        )
    for taken in table.values():
        again = (taken.__module__, taken.__qualname__, taken.stage_id) == (
            codec_class.__module__, codec_class.__qualname__, stage_id
        )  # fmt: skip
        if again and not is_ours(codec_class):  # a cell of a notebook that runs again
            continue
        if taken.stage_id == stage_id or taken.__name__ == codec_class.__name__:
            raise InvalidArgumentError(
                f"{codec_class.__name__} (id {stage_id}): expected an unused name and id, "
                f"got the name or id of {taken.__name__} (id {taken.stage_id})"
            )
    table[stage_id] = codec_class
    return codec_class


def registered(kind: type) -> dict[int, Any]:
    """Return {stage id: class} of all codecs of ``kind``, which is IndexCodec or ValueCodec."""
    return dict(_registry[kind])


def find(kind: type, stage_id: int) -> Any:
    """Return the class of ``kind`` with ``stage_id``; raise UnknownCodecError if there is none."""
    try:
        return _registry[kind][stage_id]
    except KeyError:
        raise UnknownCodecError(
            f"{kind.__name__}: got the unknown id {stage_id}; known: {sorted(_registry[kind])}"
        ) from None
