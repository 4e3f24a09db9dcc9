"""from_params: make a compressor from the settings of GRACE and DeepReduce."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from deepreduce_hvd import container
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.migration.params_table import (
    CHOICES,
    DEFAULTS,
    OTHER_NAMES,
    WITHOUT_DEFAULT,
    WITHOUT_EFFECT,
)
from deepreduce_hvd.stages.index_codecs import Bloom, RawIndex
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier, RandomK
from deepreduce_hvd.stages.value_codecs import Float16, RawValue
from deepreduce_hvd.user_warnings import warn
from deepreduce_hvd.validation import shown

_PARTS = ("index", "value", "both", None)
#: settings that all layers share
_FOR_ALL = ("memory", "communicator", "layers")
#: settings for which None has a meaning; elsewhere it means not given, as argparse uses it
_WITH_NONE = {*CHOICES, "dense"}
_RAW = {"index": RawIndex(), "value": RawValue()}
_NAMES = (*DEFAULTS, *WITHOUT_DEFAULT, *WITHOUT_EFFECT)


class _Settings:
    """The dictionary of settings.

    It records which settings were read and what will differ from GRACE and DeepReduce.
    """

    def __init__(self, params):
        if not isinstance(params, Mapping):
            raise InvalidArgumentError(
                f"params: expected a dictionary of settings, got {type(params).__name__}"
            )
        self._params = {
            name: value for name, value in params.items() if value is not None or name in _WITH_NONE
        }
        # before anything else: with a misspelled name, a default would be refused in its place
        unknown = [name for name in self._params if name not in _NAMES]
        if unknown:
            raise InvalidArgumentError(
                f"params: expected names of settings, got {', '.join(map(str, unknown))}"
                f"{''.join(map(_advice, unknown))}"
            )
        self._used = set()
        self.differences = []

    def __call__(self, name, default=None):
        """Return the value of a setting.

        Without a value, return ``default``, or the default in DEFAULTS if ``default`` is None.
        """
        self._used.add(name)
        return self._params.get(name, DEFAULTS.get(name) if default is None else default)

    def has(self, name):
        return name in self._params

    def differ(self, text):
        self.differences.append(text)

    def choice(self, setting):
        """Return the value of a setting and its :class:`Choice` in the table."""
        given = self(setting)
        name = "none" if given is None else given
        choices = CHOICES[setting]
        accepted = ", ".join(known for known, choice in choices.items() if choice.make is not None)
        if not isinstance(name, str) or name not in choices:
            raise InvalidArgumentError(f"{setting}: expected one of {accepted}, got {given!r}")
        choice = choices[name]
        if choice.make is None:
            raise InvalidArgumentError(
                f"{setting}: expected one of {accepted}, got {name!r}, which has no equivalent"
                f" here: {choice.instead}"
            )
        if choice.differs:
            self.differ(f"{setting} {name}: {choice.differs}")
        return name, choice

    def make(self, setting):
        return self.choice(setting)[1].make(self)

    def finish(self, given=None):
        """Note settings without effect, and refuse settings that were not read.

        A setting of None counts as not given.

        Args:
            given: the settings to look at; by default all.

        Raises:
            InvalidArgumentError: a setting was not read.
        """
        for name, text in WITHOUT_EFFECT.items():
            if text and self._params.get(name):
                self.differ(f"{name}: {text}")
        unused = [
            name
            for name, value in (self._params if given is None else given).items()
            if value is not None and name not in self._used | set(WITHOUT_EFFECT)
        ]
        if unused:
            raise InvalidArgumentError(
                "params: expected settings that apply to this choice"
                f" ({', '.join(sorted(self._used))}), got also {', '.join(sorted(unused))}"
            )


def _advice(name):
    """Return what to write in place of the name of a setting that is unknown, or ""."""
    if name in OTHER_NAMES:
        return f"; for {name} write {OTHER_NAMES[name]}"
    similar = difflib.get_close_matches(str(name), _NAMES, n=1)
    similar += [known for known in _NAMES if name in known.split("_")]
    return f"; did you mean {similar[0]}?" if similar else ""


def from_params(params: Mapping[str, Any], parameters: Iterable[Any], **options: Any) -> Compressor:
    """Return a :class:`Compressor` for a dictionary of settings of GRACE or DeepReduce.

    Every setting and value in the scripts of these projects is either accepted, or refused with an
    error that says what to write instead. Settings that the dictionary does not contain have the
    defaults of the code of these projects, even where :class:`Compressor` has another default: no
    compressor, no memory, allreduce, a ratio of 0.3, a threshold of 0.01 and the policy leftmost. A
    warning names what works differently here. docs/migration.md lists all names and values.

    >>> # params = {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual"}
    >>> # dr.from_params({**params, "communicator": "allgather"}, model.named_parameters())

    Args:
        params: settings by name. "compressor" comes with "compress_ratio", "threshold" or
            "quantum_num". "memory" and "communicator" select these stages. "deepreduce" is "index",
            "value", "both" or None. It says which of the settings "index" (with "fpr" and "policy")
            and "value" (with "poly_degree", "quantum_num", "bucket_size" or "bits") apply. "layers"
            is an addition: {pattern of parameter names: "dense", "fp16", or settings of the codec
            that differ there}.
        parameters: (name, parameter) pairs or TensorFlow variables, as for :class:`Compressor`.
        options: more keyword arguments of :class:`Compressor`. ``dense_below`` is 0 by default
            here, because GRACE compresses small tensors too.

    Returns:
        A :class:`Compressor`. With the compressors "none" and "fp16" and the communicator
        "allreduce", all gradients go through Horovod's own allreduce.

    Raises:
        InvalidArgumentError: a setting or value is unknown, has no equivalent here, or does not
            apply to the other settings. A setting that would change a result is never silently
            ignored.
    """
    for name in ("codec", "memory", "communicator"):
        if name in options:
            raise InvalidArgumentError(
                f"from_params: expected {name} among the settings, which choose it, got the"
                f" argument {name}={shown(options[name])}; use Compressor for stages of your own"
            )
    settings = _Settings(params)
    codec = _codec(settings)
    memory = settings.make("memory")
    communicator = _communicator(settings, codec)
    layers = {
        pattern: codec if own is None else own for pattern, own in _layers(settings, params).items()
    }
    settings.finish()
    chosen = {**layers, "*": layers.get("*", codec)} if layers else codec
    everything = False
    if settings("communicator") == "allreduce":
        halves = "fp16" in map(_way, chosen.values() if layers else [codec])
        if halves and memory.state:
            settings.differ("memory: the errors of rounding to fp16 are not kept")
        if layers:
            chosen = {pattern: _way(own) for pattern, own in chosen.items()}
        elif halves:
            chosen = "fp16"
        else:
            everything = _way(codec) == "dense"
    options.setdefault("dense_below", container.MAX_ELEMENTS + 1 if everything else 0)
    compressor = Compressor(chosen, memory, communicator, parameters, **options)
    for text in settings.differences:
        warn(f"from_params: {text}")
    return compressor


def _way(codec):
    """Return how allreduce sends a layer: "dense" or "fp16" for all elements, or as given."""
    if not isinstance(codec, Codec) or not isinstance(codec.sparsifier, NoneSparsifier):
        return codec
    return "fp16" if isinstance(codec.value, Float16) else "dense"


def _layers(settings, params):
    """Return {pattern: codec, "dense" or "fp16"} of the setting "layers"."""
    given = settings("layers")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            "layers: expected a dictionary of name patterns, such as {'embed*': 'dense'}, got"
            f" {given!r}"
        )
    shared = {name: value for name, value in params.items() if name not in _FOR_ALL}
    layers = {}
    for pattern, own in given.items():
        if not isinstance(own, Mapping):
            layers[pattern] = own  # Compressor says what it expects
            continue
        for name in _FOR_ALL:
            if name in own:
                raise InvalidArgumentError(
                    f"layers {pattern!r}: expected settings of a codec, got {name}, which is for"
                    " all layers"
                )
        layer = _Settings({**shared, **own})
        layers[pattern] = _codec(layer)
        _communicator(settings, layers[pattern])
        layer.finish(own)
        for text in layer.differences:
            if text not in settings.differences:
                settings.differ(text)
    return layers


def _codec(settings):
    part = settings("deepreduce")
    if part not in _PARTS:
        raise InvalidArgumentError(f"deepreduce: expected index, value, both or None, got {part!r}")
    if part is not None and not settings.has("compressor"):
        raise InvalidArgumentError(
            "compressor: expected one that selects elements, such as 'topk', with 'deepreduce', got"
            " no compressor; the default is 'none'"
        )
    name, choice = settings.choice("compressor")
    stages = choice.make(settings)
    if part is not None and len(stages) > 1:
        raise InvalidArgumentError(
            f"deepreduce: expected None with the compressor {name}, which has its own value codec,"
            f" got {part!r}; remove the setting"
        )
    for stage in ("index", "value") if part == "both" else () if part is None else (part,):
        stages[stage] = settings.make(stage)
    codec = Codec(**stages)
    if (
        part == "both"
        and isinstance(codec.index, Bloom)
        and codec.index.policy in ("leftmost", "p1")
    ):
        settings.differ(
            "deepreduce both: sends the values at the indices that the policy chooses, as in the"
            " paper; DeepReduce's code sends the values of the sparsifier"
        )
    return codec


def _communicator(settings, codec):
    name, choice = settings.choice("communicator")
    if name == "allreduce" and not isinstance(codec.sparsifier, (NoneSparsifier, RandomK)):
        said = "" if settings.has("communicator") else ", the default"
        raise InvalidArgumentError(
            f"communicator: expected allgather with {codec.sparsifier!r}, got allreduce{said},"
            " which needs the same indices on all ranks and works only with the compressors"
            " none, fp16 and randomk; write 'communicator': 'allgather'"
        )
    for stage in choice.unused_stages:
        if name == "allreduce" and _way(codec) == "fp16":
            continue
        if getattr(codec, stage) != _RAW[stage]:
            raise InvalidArgumentError(
                f"communicator: expected one that encodes with {getattr(codec, stage)!r}, got"
                f" {name}, which does not use it; write 'communicator': 'allgather'"
            )
    return choice.make(settings)
