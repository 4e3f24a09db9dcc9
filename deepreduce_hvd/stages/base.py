"""What every stage is: a small immutable object with a wire id and at most four numeric parameters.

A stage's class holds its NumPy implementation, which is both its specification in code and the
oracle that the native core is tested against. A codec of the user's own subclasses
:class:`IndexCodec` or :class:`ValueCodec`, takes a wire id of 128 to 255 and registers itself; a
sparsifier or memory of one's own needs neither, since it never travels. Nothing else changes
(docs/add-a-codec.md).
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError, UnknownCodecError

#: the state arrays of a memory, (d,) float32 each
Arrays = tuple[np.ndarray, ...]
Registered = TypeVar("Registered", bound="type[Stage]")

#: The package's own codecs take ids below this one; the rest are the users'.
FIRST_USER_ID = 128


class Stage:
    """The part that all stages share: identity by parameters. Constructors raise
    InvalidArgumentError for what is not in the range that they name.
    """

    #: the id in docs/format.md
    stage_id: int | None = None

    def parameters(self, step: int = 0) -> Sequence[float]:
        """At most four floats, in the order that the native core knows.

        ``step`` matters to schedules only.
        """
        return ()

    def fields(self, step: int = 0) -> list[float]:
        """[wire id, four parameters], as the native core takes a stage."""
        parameters = [float(value) for value in self.parameters(step)]
        assert self.stage_id is not None
        return [float(self.stage_id), *parameters, *[0.0] * (4 - len(parameters))]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items()))))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class Sparsifier(Stage):
    """Chooses which elements are sent."""

    #: from this step on, ``parameters`` stay as they are
    schedule_steps: int = 0

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        """Ascending uint32 indices of what to send from ``accumulated`` (d,) float32; ``key`` is
        equal on all ranks.
        """
        raise NotImplementedError

    def most_selected(self, d: int, step: int = 0) -> int | None:
        """The most elements that are selected of any ``d``, or None when that depends on the
        gradient.
        """
        return None


class IndexCodec(Stage):
    """Turns a set of indices into bytes and back."""

    #: the codec carries indices in any order, so that values that travel sorted need no order
    #: mapping
    any_order: bool = False

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        """``indices`` (k,) uint32, ascending, distinct, below ``d`` -> (section bytes, decoded
        indices, values_stay).

        A lossless codec returns ``(section, indices, False)``. A lossy one returns the ascending
        indices that the receiver will derive; values are then taken there, unless ``values_stay``
        says that the original values stay. ``value_bits`` is what one more value costs; ``key``
        seeds random choices and is not known to the receiver.
        """
        raise NotImplementedError

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        """bytes -> (count,) uint32, distinct, below ``d``, ascending unless ``any_order``; raises
        CorruptPayloadError.
        """
        raise NotImplementedError


class ValueCodec(Stage):
    """Turns values into bytes and back."""

    #: the codec sends values in an order of its own
    sorts: bool = False

    def bits_a_value(self) -> float:
        """An estimate of the payload's bits for one more value."""
        return 32.0

    def encode(self, values: np.ndarray, key: int) -> tuple[bytes, np.ndarray, np.ndarray | None]:
        """``values`` (k,) finite float32 -> (section bytes, decoded (k,) float32, order).

        ``decoded[i]`` is what ``values[i]`` decodes to. ``order`` is None, or when the codec
        ``sorts`` a (k,) uint32 array: ``order[j]`` is the position in ``values`` of the j-th value
        sent. ``key`` seeds stochastic rounding.
        """
        raise NotImplementedError

    @classmethod
    def decode(cls, section: bytes, count: int) -> np.ndarray:
        """bytes -> (count,) float32 in the order sent; raises CorruptPayloadError."""
        raise NotImplementedError


class Memory(Stage):
    """What becomes of the part of a gradient that was not sent.

    State arrays are in units of the gradient: a change of the loss scale multiplies them, and where
    ranks take over what others kept, they are added up. They start as zeros.
    """

    #: names of the float32 state arrays (d,) that it keeps for each parameter, in the order of
    #: docs/format.md
    state: tuple[str, ...] = ()
    #: the first state array is exactly what payloads have not carried so far
    keeps_everything: bool = False

    def accumulate(self, gradient: np.ndarray, state: Arrays) -> tuple[np.ndarray, Arrays]:
        """``gradient`` (d,) float32, ``state`` a tuple of (d,) float32 arrays -> (what to select
        from, new state).

        All are finite, and left as they are: what is returned is new.
        """
        raise NotImplementedError

    def update(
        self,
        gradient: np.ndarray,
        accumulated: np.ndarray,
        state: Arrays,
        indices: np.ndarray,
        decoded: np.ndarray,
    ) -> Arrays:
        """The state once a payload that decodes to ``decoded`` (k,) at ``indices`` (k,) was sent;
        gets accumulate's state.
        """
        raise NotImplementedError

    def put_back(self, state: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        """Takes back, in place, what was sent and did not reach the sum: ``values`` (k,) at
        distinct ``indices`` (k,).

        Only :class:`Allgather` does without.
        """
        raise NotImplementedError


def _is_ours(stage_class):
    return stage_class.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_built_in(stage):
    """Whether a stage is the package's own, which the native core knows; a subclass of one is its
    author's.
    """
    return _is_ours(type(stage))


def overrides(stage, base, method):
    """Whether a stage's class has a method of its own in place of that of ``base``, which raises
    NotImplementedError.
    """
    own, inherited = (
        getattr(getattr(kind, method), "__func__", getattr(kind, method))
        for kind in (type(stage), base)
    )
    return own is not inherited


def expect_usable(stage):
    """Raises InvalidArgumentError for a stage of the user's own that lacks what it needs in order
    to work.
    """
    if is_built_in(stage):
        return
    name = type(stage).__name__
    kind, needed = next(
        (kind, needed) for kind, needed in _NEEDED.items() if isinstance(stage, kind)
    )
    missing = [method for method in needed if not overrides(stage, kind, method)]
    if missing:
        raise InvalidArgumentError(
            f"{name}: expected the methods {' and '.join(needed)}, got no {' and no '.join(missing)}"
        )
    if " at 0x" in repr(stage):
        raise InvalidArgumentError(
            f"{name}: expected attributes with a repr that is the same on all ranks, such as numbers, got {stage!r}"
        )
    if kind is Memory:
        names = stage.state
        if (
            not isinstance(names, tuple)
            or not all(isinstance(one, str) and one for one in names)
            or len(set(names)) < len(names)
        ):
            raise InvalidArgumentError(
                f"{name}.state: expected a tuple of different names, got {names!r}"
            )
    elif kind in _registry and _registry[kind].get(stage.stage_id) is not type(stage):
        taken = _registry[kind].get(stage.stage_id)
        raise InvalidArgumentError(
            f"{name}: expected a class with a stage_id of its own, registered with @dr.register, got stage_id {stage.stage_id!r}, "
            + ("which is not registered" if taken is None else f"which is that of {taken.__name__}")
        )


#: what a stage of the user's own must have
_NEEDED = {
    Sparsifier: ("select",),
    IndexCodec: ("encode", "decode"),
    ValueCodec: ("encode", "decode"),
    Memory: ("accumulate", "update"),
}

_registry: dict[type, dict[int, Any]] = {IndexCodec: {}, ValueCodec: {}}


def register(codec_class: Registered) -> Registered:
    """Makes a codec decodable by its wire id; use as a class decorator. Returns the class.

    Raises:
        InvalidArgumentError: neither an :class:`IndexCodec` nor a :class:`ValueCodec`, an id
            outside of 128 to 255, or an id or name that is taken.
    """
    table = next(
        (table for kind, table in _registry.items() if issubclass(codec_class, kind)), None
    )
    if table is None:
        raise InvalidArgumentError(
            f"register: expected an IndexCodec or a ValueCodec, got {codec_class!r}"
        )
    stage_id = codec_class.stage_id
    first = 1 if _is_ours(codec_class) else FIRST_USER_ID
    if not isinstance(stage_id, int) or not first <= stage_id <= 255:
        raise InvalidArgumentError(
            f"{codec_class.__name__}.stage_id: expected an integer of {first} to 255, got {stage_id!r}"
        )
    for taken in table.values():
        if taken.stage_id == stage_id or taken.__name__ == codec_class.__name__:
            raise InvalidArgumentError(
                f"{codec_class.__name__} (id {stage_id}): expected a free name and id, got those of {taken.__name__} (id {taken.stage_id})"
            )
    table[stage_id] = codec_class
    return codec_class


def registered(kind: type) -> dict[int, Any]:
    """{wire id: class} of ``kind``, IndexCodec or ValueCodec."""
    return dict(_registry[kind])


def find(kind: type, stage_id: int) -> Any:
    """The class of ``kind`` with ``stage_id``; UnknownCodecError when there is none."""
    try:
        return _registry[kind][stage_id]
    except KeyError:
        raise UnknownCodecError(
            f"{kind.__name__}: got the unknown id {stage_id}; known: {sorted(_registry[kind])}"
        ) from None
