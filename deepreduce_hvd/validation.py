"""Check the arguments of :class:`Compressor`; errors suggest what was probably meant."""

import collections
import functools
import math
import reprlib
from collections.abc import Mapping, Sequence

from deepreduce_hvd import container
from deepreduce_hvd.argument_checks import expect_integer, is_number
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import Communicator
from deepreduce_hvd.communicators.base import expect_exchange
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import IndexCodec, Memory, Sparsifier, ValueCodec, overrides
from deepreduce_hvd.stages.index_codecs.bloom import Bloom
from deepreduce_hvd.stages.sparsifiers.threshold import Threshold
from deepreduce_hvd.stages.suggestions import called, makes, written
from deepreduce_hvd.stages.usable import expect_same_text, expect_usable
from deepreduce_hvd.stages.value_codecs.deflate import Deflate
from deepreduce_hvd.stages.value_codecs.raw_value import RawValue
from deepreduce_hvd.user_warnings import warn

_STAGES = (Codec, Memory, Communicator, Sparsifier, IndexCodec, ValueCodec)
#: {what users write for an uncompressed way: its name here}
_WAYS = {
    "none": "dense", "nonecompressor": "dense", "fp16": "fp16", "fp16compressor": "fp16",
    "half": "fp16", "float16": "fp16", "bf16": "fp16", "bfloat16": "fp16",
}  # fmt: skip


def expect_communicator(communicator):
    """Raise InvalidArgumentError unless ``communicator`` is a Communicator."""
    if not isinstance(communicator, Communicator):
        hint = meant(communicator, Communicator)
        if isinstance(communicator, str):
            hint = f"; write communicator=dr.{called(communicator, Communicator) or 'Allgather()'}"
        raise InvalidArgumentError(
            "Compressor communicator: expected a Communicator or 'auto', got "
            f"{shown(communicator)}{hint}"
        )
    expect_exchange("Compressor communicator", communicator)
    expect_same_text("Compressor communicator", communicator)


def expect_stages(codec, memory, communicator):
    """Check that a codec, a memory and the communicator work together.

    Raises:
        InvalidArgumentError: they do not work together.
    """
    expect_usable(memory)
    error = codec.value.relative_error()
    if memory.state and error >= 1:
        raise InvalidArgumentError(
            "Compressor codec: expected a value codec whose error is smaller than the "
            f"values, got {codec.value!r}, "
            f"whose error is about {error:.1f} times as large; {memory!r} would grow "
            "without limit. Use more bits, a "
            "smaller bucket, or NoMemory()"
        )
    if memory.state and codec.index.misplaces_values:
        raise InvalidArgumentError(
            "Compressor codec: expected an index codec that keeps values at their indices, got "
            f"{codec.index!r}; {memory!r} would grow without limit. Use another Bloom policy, such "
            "as p0 or p2, or NoMemory()"
        )
    if communicator.puts_back and not overrides(memory, Memory, "put_back"):
        raise InvalidArgumentError(
            "Compressor memory: expected one with a put_back method, which "
            f"{communicator!r} needs, "
            f"got {memory!r}; Allgather does not need it"
        )
    communicator.check(codec, memory)


def warn_of_growth(codec, memory):
    """Warn if payloads or residuals would grow from step to step."""
    sparsifier, value = codec.sparsifier, codec.value
    if memory.state and isinstance(codec.index, Bloom) and codec.index.policy == "leftmost":
        warn(
            f"with {codec.index!r}, false positives take the places of the last"
            " indices. So the end of a tensor is hardly ever sent, and what"
            f" {memory!r} keeps of it grows. Use the policy p0 or p2, or NoMemory()"
        )
    all_nonzero = isinstance(sparsifier, Threshold) and sparsifier.keeps_all
    if all_nonzero and memory.state and not isinstance(value, (RawValue, Deflate)):
        warn(
            f"{sparsifier!r} sends every non-zero element, and {memory!r} keeps "
            f"the errors of {value!r}. So an element that was sent once is sent in every later "
            "step, and payloads grow. Use memory=NoMemory(), or for some parameters "
            "memory={pattern: NoMemory()}"
        )


def shown(value):
    """Return the repr of a value, shortened unless the value is a stage or a class."""
    return repr(value) if isinstance(value, (*_STAGES, type)) else reprlib.repr(value)


def meant(value, kind):
    """Return a suggestion to append to the message for a value of the wrong type, or ""."""
    if isinstance(value, str) and (text := called(value, kind)):
        return f"; write {text}"
    if _are_patterns(value):
        pattern, chosen = value[0]
        return f"; write a dictionary, as in {{{pattern!r}: {chosen!r}}}"
    if kind is Codec and (text := _codec_for(value)):
        return f"; write {text}"
    if kind is Codec and (is_model(value) or (_is_iterable(value) and not isinstance(value, str))):
        return "; for parameters write Compressor(parameters=model.named_parameters())"
    if not makes(value, _STAGES):
        return ""
    text = written(value)
    if isinstance(value, type) and makes(value, kind):
        return f"; write {text} to pass an instance"
    if makes(value, Sparsifier):
        codec = f"Codec({text}, index=Rice(), value=LloydMax(bits=1))"
        return f"; write Compressor({codec}, parameters=...)"
    if makes(value, IndexCodec):
        return f"; write Compressor(Codec(TopK(0.01), index={text}), parameters=...)"
    if makes(value, ValueCodec):
        return f"; write Compressor(Codec(TopK(0.01), value={text}), parameters=...)"
    if makes(value, Codec):
        return "; write Compressor(codec, ...), with the codec first"
    name = "memory" if makes(value, Memory) else "communicator"
    return f"; write Compressor({name}={text}, parameters=...)"


def _are_patterns(value):
    """Return whether a value is a list of (pattern, stage) pairs, in place of a dictionary."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        and all(isinstance(one, str) and isinstance(it, (str, *_STAGES)) for one, it in value)
    )


def _codec_for(value):
    """Return what to write in place of a text, a number or a class of Horovod; None if unknown."""
    if isinstance(value, type) and value.__module__.partition(".")[0] == "horovod":
        way = _WAYS.get(value.__name__.lower())
        return way and repr(way)
    if is_number(value):
        ratio = float(value) if 0 < value <= 1 else 0.01
        return f"dr.recommended_codec(density={ratio})"
    if not isinstance(value, str):
        return None
    if value.lower() in _WAYS:
        return repr(_WAYS[value.lower()])
    sparsifier = called(value, Sparsifier) or "TopK(0.01)"
    index = called(value, IndexCodec) or "Rice()"
    of_values = called(value, ValueCodec)
    last = f", value=dr.{of_values}" if of_values else ""
    return f"dr.Codec(dr.{sparsifier}, index=dr.{index}{last})"


def expect_settings(
    *, bucket_bytes, threads, dense_below, seed, process_set, loss_scale, writer, writer_interval
):
    """Check the other arguments of :class:`Compressor`.

    Returns:
        A tuple (bucket_bytes, threads, dense_below, seed, writer_interval), ints of Python or None.

    Raises:
        InvalidArgumentError: one of them has the wrong type or value.
    """
    bucket_bytes = expect_integer(
        "Compressor bucket_bytes", bucket_bytes, "an integer of at least 0", lambda n: n >= 0
    )
    if threads is not None:
        threads = expect_integer(
            "Compressor threads", threads, "None or an integer of at least 0", lambda n: n >= 0
        )
    if dense_below is not None:
        dense_below = expect_integer(
            "Compressor dense_below",
            dense_below,
            "None or an integer of at least 0",
            lambda n: n >= 0,
        )
    seed = expect_integer(
        "Compressor seed", seed, "an integer in [0, 2^63)", lambda n: 0 <= n < 2**63
    )
    if process_set is not None and not hasattr(process_set, "process_set_id"):
        raise InvalidArgumentError(
            "Compressor process_set: expected a horovod ProcessSet, as hvd.add_process_set(ranks) "
            f"returns, got {process_set!r}"
        )
    if loss_scale is not None and not callable(loss_scale):
        raise InvalidArgumentError(
            "Compressor loss_scale: expected a function such as scaler.get_scale, got "
            f"{loss_scale!r}"
        )
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise InvalidArgumentError(
            "Compressor writer: expected an object with add_scalar, such as "
            f"torch.utils.tensorboard.SummaryWriter('runs'), got {writer!r}"
        )
    writer_interval = expect_integer(
        "Compressor writer_interval",
        writer_interval,
        "an integer of at least 1, the number of steps between two records",
        lambda n: n >= 1,
    )
    return bucket_bytes, threads, dense_below, seed, writer_interval


def named_parameters(parameters):
    """Return the parameters of a :class:`Compressor` as a list of (name, parameter) pairs.

    Args:
        parameters: (name, parameter) pairs, or TensorFlow or Keras variables, which have names.

    Raises:
        InvalidArgumentError: not such parameters, none of them, or a name that appears twice.
    """
    if parameters is None:
        raise InvalidArgumentError(
            "Compressor parameters: expected model.named_parameters(), got None; state is "
            "stored by "
            "parameter name (on TensorFlow: model.trainable_variables)"
        )
    if isinstance(parameters, Mapping) or is_model(parameters) or not _is_iterable(parameters):
        raise InvalidArgumentError(
            "Compressor parameters: expected what model.named_parameters() returns, got "
            f"{type(parameters).__name__}{_line_for(parameters)}"
        )
    named = [entry if isinstance(entry, tuple) else _with_name(entry) for entry in parameters]
    for entry in named:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise InvalidArgumentError(
                "Compressor parameters: expected (name, parameter) pairs, got "
                f"{type(entry).__name__}{_line_for(parameters)}"
            )
    if not named:
        raise InvalidArgumentError(
            "Compressor parameters: expected at least one parameter, got none; a generator can be "
            "read only once, so write model.named_parameters() again; a Keras model has parameters "
            "after model.build(shape) or a first call"
        )
    counts = collections.Counter(name for name, _ in named)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise InvalidArgumentError(
            f"Compressor parameters: expected unique names, got {', '.join(repeated)} "
            "more than once; pass (name, parameter) pairs with other names"
        )
    return named


def names_without_effect(named, policies, table_candidates):
    """Return the names of parameters that have a later name too, which is the one that counts.

    Args:
        named: list of (name, parameter) pairs.
        policies: {name: its :class:`~deepreduce_hvd.planning.policies.Policy`}.
        table_candidates: names of the parameters that may become embedding tables.

    Raises:
        InvalidArgumentError: such a name has another codec or memory than the one that counts.
    """
    last = {id(parameter): name for name, parameter in named}
    pairs = [(name, last[id(parameter)]) for name, parameter in named]
    pairs = [(name, counts) for name, counts in pairs if name != counts]
    for pair in pairs:
        first, second = (
            f"{policies[one]!r}{' (or rows, if a table)' if one in table_candidates else ''}"
            for one in pair
        )
        if first != second:
            raise InvalidArgumentError(
                f"Compressor parameters: expected the same codec and memory for {pair[0]} and"
                f" {pair[1]}, two names of one parameter, got {first} for the first and"
                f" {second} for the second; write patterns that match both, or pass the parameter"
                " under one name, as model.named_parameters() does"
            )
    return frozenset(name for name, _ in pairs)


def is_model(value):
    """Return whether a value is a model of PyTorch or Keras, or another module with variables.

    Lists that a module of TensorFlow tracks have such attributes too.
    """
    has_parameters = hasattr(value, "named_parameters") or hasattr(value, "trainable_variables")
    return has_parameters and not isinstance(value, Sequence)


def _is_iterable(value):
    return hasattr(value, "__iter__")


def _line_for(given):
    """Return what to write in place of a model or of values without names."""
    if hasattr(given, "named_parameters"):
        return "; write parameters=model.named_parameters()"
    if hasattr(given, "trainable_variables"):
        return "; write parameters=model.trainable_variables"
    return (
        "; write parameters=model.named_parameters(), or on TensorFlow"
        " parameters=model.trainable_variables"
    )


def _with_name(parameter):
    """Return the (name, variable) pair of a TensorFlow or Keras variable; others unchanged."""
    name = getattr(parameter, "path", None) or getattr(parameter, "name", None)
    return (name, parameter) if isinstance(name, str) else parameter


def expect_size(name, elements, kind):
    """Raise InvalidArgumentError if a parameter is too large for one payload.

    Args:
        name: name of the parameter.
        elements: its number of elements.
        kind: what the framework calls it, as in "tensor".
    """
    if elements > container.MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"Compressor parameter {name}: expected at most {container.MAX_ELEMENTS} elements, "
            f"got {elements}; split the {kind}"
        )


def expect_loss_scale(scale):
    """Return the loss scale, a float; raise InvalidArgumentError if it is not a valid scale."""
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(
            "Compressor loss_scale: expected a function that returns a finite number "
            f"above 0, got {scale}"
        )
    return scale


def of_an_instance(method):
    """Refuse calls on the class itself, which Horovod makes if it was given the class."""

    @functools.wraps(method)
    def checked(self, *arguments):
        if not arguments:
            raise InvalidArgumentError(
                "compression: expected a compressor, got the class Compressor; "
                "write compression=dr.Compressor(parameters=model.named_parameters())"
            )
        return method(self, *arguments)

    return checked


def refuse_reducescatter():
    """Raise InvalidArgumentError: Horovod would scatter what only a whole reduction decodes."""
    raise InvalidArgumentError(
        "compress: expected a call by Horovod's allreduce, got one by reducescatter; give that"
        " compression=hvd.Compression.fp16, or none"
    )
