"""Policies: how the gradient of each parameter is sent.

``Compressor(codec=, memory=)`` take one stage for all parameters, a mapping of name patterns, or a
function of a parameter's name and shape. :func:`resolve` turns them into one :class:`Policy` per
parameter.
"""

import dataclasses
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from deepreduce_hvd.argument_checks import expect_float, expect_integer, is_integer
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.index_codecs import RLE, Rice
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier, Threshold, TopK
from deepreduce_hvd.stages.value_codecs import LloydMax
from deepreduce_hvd.validation import is_model, meant, shown

_Shape: TypeAlias = tuple[int, ...]
#: what ``Compressor(codec=)`` takes
CodecChoice: TypeAlias = (
    Codec | str | Mapping[str, Codec | str] | Callable[[str, _Shape], Codec | str | None] | None
)
#: what ``Compressor(memory=)`` takes
MemoryChoice: TypeAlias = (
    Memory | Mapping[str, Memory] | Callable[[str, _Shape], Memory | None] | None
)
#: what ``Compressor(codec=)`` takes for embedding tables
ROWS = "rows"
_MOST_NAMES = 5
#: share of a large tensor's elements that the default codec sends
DENSITY = 0.01
#: steps in which that share falls from 25 %
WARMUP_STEPS = 50
_LARGE = 1024  # elements from which a tensor is large
_SMALLEST = 32  # elements from which the payload of a small tensor is smaller than the tensor


def recommended_codec(
    shape: _Shape | None = None, density: float = DENSITY, warmup_steps: int = WARMUP_STEPS
) -> Codec:
    """Return the default codec of :class:`Compressor`.

    For large tensors, it sends the 1 % of elements of largest magnitude. In the first 50 steps the
    ratio falls from 25 % to 1 %. From then on, each sent element takes about 9 bits. For tensors
    with fewer than 1,024 elements, it sends all elements in 4 bits each, without delay. (A
    compressor sends tensors with fewer than 32 elements uncompressed, and embedding tables by their
    rows.) docs/accuracy.md gives the measurements behind this choice.

    Args:
        shape: shape of the tensor. Default: that of a large tensor.
        density: share of the elements to send of a large tensor, a number in (0, 1].
        warmup_steps: number of steps in which the share falls from 25 % to ``density``.

    Returns:
        ``Codec(TopK(density, warmup_steps=warmup_steps), index=Rice(), value=LloydMax(bits=1))``,
        or ``Codec(NoneSparsifier(), index=Rice(), value=LloydMax(bits=4))`` for a small tensor.
        There, ``Rice`` is used only for ``tf.IndexedSlices``: all other payloads have no indices.

    Raises:
        InvalidArgumentError: ``shape`` is not a sequence of sizes, or a number is out of range.
    """
    if shape is not None and _elements(shape) < _LARGE:
        return Codec(NoneSparsifier(), index=Rice(), value=LloydMax(bits=4))
    sparsifier = TopK(density, warmup_steps=warmup_steps)
    return Codec(sparsifier, index=Rice(), value=LloydMax(bits=1))


def rows_codec(on_gpu: bool = False) -> Codec:
    """Return the codec that ``"rows"`` stands for: all non-zero elements, in 4 bits each.

    It is for embedding tables, where most rows of a gradient are zero (docs/accuracy.md).

    Args:
        on_gpu: whether to take the index codec that works on a GPU too, with larger payloads.
    """
    return Codec(Threshold(0), index=Rice() if on_gpu else RLE(), value=LloydMax(bits=4))


def default_memory(codec: Any) -> Memory:
    """Return the memory of a parameter with a codec that the user chose, or with none."""
    return NoMemory() if isinstance(codec, str) and codec == ROWS else Residual()


def _elements(shape: Any) -> int:
    """Return the number of elements of a tensor of a shape that a user gave."""
    expected = "shape: expected sizes such as (64, 10), got"
    if hasattr(shape, "shape"):
        raise InvalidArgumentError(
            f"{expected} {type(shape).__name__}; for a tensor write tensor.shape"
        )
    is_sequence = isinstance(shape, Iterable) and not isinstance(shape, (str, bytes))
    sizes = tuple(shape) if is_sequence else (None,)
    if not all(is_integer(size) and size >= 0 for size in sizes):
        raise InvalidArgumentError(f"{expected} {shown(shape)}")
    return math.prod(sizes)


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the gradient of one parameter is sent.

    Attributes:
        way: "codec": compressed. "dense": uncompressed, through Horovod's own allreduce. "fp16":
            the same, converted to float16.
        codec: the codec, if ``way`` is "codec"; otherwise None.
        memory: the memory. If ``way`` is not "codec", it is that of the parameter's codec where a
            plan chose the way, and otherwise :class:`NoMemory`. On TensorFlow, a plan that is given
            leaves it out.
    """

    way: str
    codec: Codec | None = None
    memory: Memory = dataclasses.field(default_factory=NoMemory)

    @property
    def dense(self) -> bool:
        """Whether Horovod's own allreduce sends the gradient."""
        return self.way != CODEC

    @property
    def selects(self) -> bool:
        """Whether only some elements of a gradient are sent."""
        return self.codec is not None and type(self.codec.sparsifier) is not NoneSparsifier

    @property
    def delays(self) -> bool:
        """Whether parts of a gradient are sent in later steps."""
        return self.selects and bool(self.memory.state)

    def __hash__(self) -> int:
        # custom stages may have attributes that are not hashable, or equal ones of another repr
        return hash((self.way, self.codec, type(self.memory)))

    def __repr__(self) -> str:
        return self.way if self.dense else f"{self.codec!r} with {self.memory!r}"


def resolve(
    codec: Any,
    memory: Any,
    shapes: Mapping[str, _Shape],
    dense_below: int | None,
    compresses_small: bool,
    default: Callable[[_Shape | None], Codec] = recommended_codec,
) -> dict[str, Policy]:
    """Return {parameter name: :class:`Policy`}.

    Args:
        codec: a :class:`Codec`, "dense", "fp16" or "rows"; a mapping of patterns to these; a
            function of (name, shape) that returns one of these; or None. Where it gives none,
            ``default`` is used.
        memory: the same with a :class:`Memory`. The default is :class:`NoMemory` for "rows", and
            otherwise :class:`Residual`.
        shapes: {parameter name: shape}.
        dense_below: parameters with fewer elements are sent uncompressed instead of with a codec.
            None: 32 where a parameter uses the default codec for small tensors, otherwise 1,024.
        compresses_small: whether small tensors have a default codec of their own.
        default: function of a shape, or of None for a large tensor, that returns the default codec.

    Raises:
        InvalidArgumentError: a value of another type, or a pattern that no parameter needs.
    """
    codec_of = _chooser("codec", codec, shapes)
    memory_of = _chooser("memory", memory, shapes)
    policies = {}
    for name, shape in shapes.items():
        chosen = codec_of(name, shape)
        kept = memory_of(name, shape) or default_memory(chosen)
        if isinstance(chosen, str) and chosen == ROWS:
            chosen = rows_codec()
        if isinstance(chosen, str):
            policies[name] = Policy(chosen)
            continue
        by_size = compresses_small and type(kept) in (NoMemory, Residual)
        by_size = by_size and chosen in (None, recommended_codec(shape))
        fewest = (_SMALLEST if by_size else _LARGE) if dense_below is None else dense_below
        if chosen is None:
            chosen = default(shape if by_size else None)
        small = math.prod(shape) < fewest
        policies[name] = Policy(DENSE) if small else Policy(CODEC, chosen, kept)
    return policies


def table_candidates(
    codec: Any, memory: Any, shapes: Mapping[str, _Shape], policies: Mapping[str, Policy]
) -> frozenset[str]:
    """Return the names of the parameters that get the codec "rows" if they are embedding tables.

    These have two dimensions, and a codec and a memory that the user did not choose.

    Args:
        codec, memory, shapes: as for :func:`resolve`.
        policies: what :func:`resolve` returned.
    """
    choosers = _chooser("codec", codec, shapes), _chooser("memory", memory, shapes)
    return frozenset(
        name
        for name, policy in policies.items()
        if len(shapes[name]) == 2
        and policy.delays
        and all(chosen(name, shapes[name]) is None for chosen in choosers)
    )


def is_single(value: Any) -> bool:
    """Return whether an argument is one stage for all parameters."""
    return not isinstance(value, Mapping) and (isinstance(value, type) or not callable(value))


def text_of(value: Any, density: float = DENSITY, warmup_steps: int = WARMUP_STEPS) -> str:
    """Return an argument as text, the same on all ranks. None stands for the default codec."""
    if value is None:
        others = "" if density == DENSITY else f", density={density!r}"
        others += "" if warmup_steps == WARMUP_STEPS else f", warmup_steps={warmup_steps!r}"
        return f"recommended_codec(shape{others})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {chosen!r}" for key, chosen in value.items()) + "}"
    return repr(value) if is_single(value) else "a function of name and shape"


def expect_of_default(codec: Any, density: Any, warmup_steps: Any) -> tuple[float, int]:
    """Return the arguments ``density`` and ``warmup_steps`` of a compressor as float and int.

    Raises:
        InvalidArgumentError: one is out of range, or no parameter has the default codec, because
            ``codec`` is one for all.
    """
    density = expect_float(
        "Compressor density", density, "a number in (0, 1]", lambda number: 0 < number <= 1
    )
    warmup_steps = expect_integer(
        "Compressor warmup_steps",
        warmup_steps,
        "an integer of at least 0",
        lambda steps: steps >= 0,
    )
    if codec is None or not is_single(codec):
        return density, warmup_steps
    for name, value, default, setting in (
        ("density", density, DENSITY, "ratio"),
        ("warmup_steps", warmup_steps, WARMUP_STEPS, "warmup_steps"),
    ):
        if value != default:
            raise InvalidArgumentError(
                f"Compressor {name}: expected none beside a codec, which says what is sent, got"
                f" {value:g} and {shown(codec)}; set {setting} of the codec's sparsifier"
            )
    return density, warmup_steps


_EXPECTED = {
    "codec": (Codec, f"a Codec, {DENSE!r}, {FP16!r} or {ROWS!r}"),
    "memory": (Memory, "a Memory"),
}


def expect_choice(what: str, given: Any) -> None:
    """Check the types in the argument ``what`` ("codec" or "memory"), as far as they are known.

    Raises:
        InvalidArgumentError: a value of another type.
    """
    if isinstance(given, Mapping):
        for key, value in given.items():
            _checked(what, f" of {key!r}", value)
    elif is_single(given) or is_model(given):
        _checked(what, "", given)
    else:
        _expect_function(what, given)


def _expect_function(what: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions that are not written in Python have none
        return
    try:
        signature.bind("weight", (1,))
    except TypeError:
        raise InvalidArgumentError(
            f"Compressor {what}: expected a function of (name, shape), got one of {signature}"
        ) from None


def _checked(what: str, where: str, value: Any) -> Any:
    kind, expected = _EXPECTED[what]
    named = what == "codec" and isinstance(value, str) and value in (DENSE, FP16, ROWS)
    if value is not None and not isinstance(value, kind) and not named:
        raise InvalidArgumentError(
            f"Compressor {what}{where}: expected {expected}, got {shown(value)}{meant(value, kind)}"
        )
    return value


def _chooser(what: str, given: Any, shapes: Mapping[str, _Shape]) -> Callable[[str, _Shape], Any]:
    """Return a function of (name, shape) that returns what is given for a parameter, or None."""

    def chosen(name: str, shape: _Shape) -> Any:
        if isinstance(given, Mapping):
            patterns = (key for key in given if fnmatch.fnmatchcase(name, key))
            return given.get(next(patterns, None))
        if is_single(given):
            return given
        return _checked(what, f" of parameter {name}", given(name, shape))

    expect_choice(what, given)
    if isinstance(given, Mapping):
        _expect_patterns(what, given, shapes)
    return chosen


def _expect_patterns(what: str, given: Mapping[Any, Any], shapes: Iterable[str]) -> None:
    """Check that each pattern is the first match of some parameter. "*" is exempt."""
    names = list(shapes)
    left = names
    for pattern in given:
        if not isinstance(pattern, str):
            raise InvalidArgumentError(
                f"Compressor {what}: expected patterns of parameter names, such as 'embed*', got"
                f" {pattern!r}"
            )
        matched = {name for name in left if fnmatch.fnmatchcase(name, pattern)}
        if not matched and pattern != "*":
            earlier = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            got = (
                "one that earlier patterns leave nothing: the first match counts, and they match"
                f" {some_of(earlier)}"
                if earlier
                else f"one that matches none of {some_of(names)}"
            )
            if not earlier and _is_literal(pattern, names):
                got += "; write [[] for a [ in a name"
            raise InvalidArgumentError(
                f"Compressor {what}: expected a pattern that a parameter needs, got {pattern!r},"
                f" {got}"
            )
        left = [name for name in left if name not in matched]


def _is_literal(pattern: str, names: list[str]) -> bool:
    """Return whether a pattern would match a name if "[" were an ordinary character."""
    literal = pattern.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(name, literal) for name in names)


def some_of(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
