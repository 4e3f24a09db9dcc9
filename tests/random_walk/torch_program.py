"""Random programs for PyTorch: a model, its optimizers and compressors, and its steps."""

import dataclasses

import torch
from own_stages import WithoutPutBack

import deepreduce_hvd as dr

#: the default codecs
_LARGE = dr.Codec(dr.TopK(0.01, warmup_steps=50), index=dr.Rice(), value=dr.LloydMax(bits=1))
_SMALL = dr.Codec(dr.NoneSparsifier(), index=dr.Rice(), value=dr.LloydMax(bits=4))


@dataclasses.dataclass
class Parameter:
    """One parameter.

    Attributes:
        kind: dense, channels_last, transposed (in memory), or embedding, whose gradient is sparse.
        frozen: whether it is frozen from the start.
        tied: whether the loss uses it twice.
        twice: whether the compressor gets it under two names, as in a model with tied weights.
        style: the distribution of its gradients.
        magnitude: the magnitude of its gradients.
    """

    name: str
    shape: tuple
    dtype: torch.dtype = torch.float32
    kind: str = "dense"
    frozen: bool = False
    tied: bool = False
    twice: bool = False
    style: str = "normal"
    magnitude: float = 1.0

    @property
    def elements(self):
        return torch.Size(self.shape).numel()

    @property
    def under_all_names(self):
        """This parameter under each name that the compressor gets. The last name counts.

        The names have the same end, so that they get the same codec.
        """
        first = [dataclasses.replace(self, name=f"first.{self.name}")] if self.twice else []
        return [*first, self]


@dataclasses.dataclass
class CompressorSettings:
    """The settings of a compressor.

    ``codec`` is None for the default, with the communicator Allgather. ``ranks`` are those of its
    process set, None for all. ``others`` are {end of a parameter's name: a codec in place of
    ``codec``, "dense" or "fp16"}.
    """

    codec: dr.Codec | None
    memory: object
    communicator: object
    bucket_bytes: int
    threads: int  # on rank 0; rank r has (threads + r) % 4
    dense_below: int | None
    seed: int
    loss_scale: bool
    ranks: tuple | None
    others: dict = dataclasses.field(default_factory=dict)

    def codec_of(self, name, elements):
        """Return the codec of a parameter, "dense" or "fp16"."""
        codec, below = self.others.get(name[-1], self.codec), self.dense_below
        by_size = codec is None and type(self.memory) in (dr.Residual, dr.NoMemory)
        if codec is None:
            codec = _SMALL if by_size and elements < 1024 else _LARGE
        if below is None:
            below = 32 if by_size else 1024
        return "dense" if elements < below and codec != "fp16" else codec

    @property
    def scheme(self):
        """The communicator, or the one that Hierarchical uses across hosts."""
        hierarchical = isinstance(self.communicator, dr.Hierarchical)
        return self.communicator.across if hierarchical else self.communicator


@dataclasses.dataclass
class Part:
    """Parameters with their own optimizer.

    Attributes:
        compressor: the number of its compressor.
        optimizer: sgd, momentum or adam.
        by_hand: whether hvd.allreduce(..., compression=) or hvd.grouped_allreduce reduces its
            gradients, without Horovod's optimizer.
        passes: backward_passes_per_step.
        groups: None, a number, or "lists".
        clip: the norm to which gradients are clipped, or None.
        zero: whether gradients are set to None ("none") or to zeros before a step.
        plain_step: whether step() also synchronizes.
        unknown: whether its first parameter was not given to the compressor.
    """

    name: str
    parameters: list
    compressor: int
    optimizer: str
    by_hand: bool
    passes: int
    op: str
    predivide: float
    groups: object
    sparse_as_dense: bool
    clip: float | None
    zero: str
    plain_step: bool
    unknown: bool = False


@dataclasses.dataclass
class Step:
    """One step of all parts.

    Attributes:
        scale: the loss scale.
        frozen: names of parameters that are frozen now.
        unused: {(name, pass): ranks that do not use it}.
        events: ("backward", ((part, pass), ...)) or ("finish", part), in order.
        poison: (name, ranks, value), or None; one element of these gradients becomes the value.
        direct: names of parameters whose gradients hvd.allreduce reduces once more after the step.
        look: whether memories are compared after the step; after the last step they always are.
        checkpoint: None, save, load, load_now, load_list, load_other_size or restart.
    """

    scale: float
    frozen: frozenset
    unused: dict
    events: list
    poison: tuple | None
    direct: tuple
    look: bool
    checkpoint: str | None


@dataclasses.dataclass
class Program:
    """A whole program. ``refused`` is the result of :func:`refusal`."""

    seed: int
    size: int
    compressors: list
    parts: list
    steps: list
    refused: str | None = None

    def ranks_of(self, part):
        """Return the ranks that train a part."""
        ranks = self.compressors[part.compressor].ranks
        return tuple(range(self.size)) if ranks is None else ranks

    def parts_of(self, number):
        """Return the parts of a compressor."""
        return [part for part in self.parts if part.compressor == number]

    def __str__(self):
        lines = [f"seed {self.seed} on {self.size} ranks, refused: {self.refused}"]
        lines += [f"  compressor {number}: {one}" for number, one in enumerate(self.compressors)]
        for part in self.parts:
            fields = {name: value for name, value in vars(part).items() if name != "parameters"}
            lines.append(f"  part {fields}")
            lines += [f"    {parameter}" for parameter in part.parameters]
        lines += [f"  step {number}: {step}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)


def refusal(program):
    """Return a regular expression for the error with which a program must end, or None.

    The error is an InvalidArgumentError. This function alone says what is refused.
    """
    for settings in program.compressors:
        if isinstance(settings.memory, WithoutPutBack) and settings.communicator.puts_back:
            return "expected one with a put_back"
        sparsifier = getattr(settings.codec, "sparsifier", None)
        if isinstance(settings.scheme, dr.GTopK) and isinstance(sparsifier, dr.Threshold):
            return "GTopK: expected a sparsifier with a fixed k"
        shared = isinstance(settings.scheme, dr.SharedRandomK)
        if shared and not isinstance(sparsifier, (dr.RandomK, dr.NoneSparsifier)):
            return "SharedRandomK: expected the sparsifier RandomK"
    for part in program.parts:
        settings = program.compressors[part.compressor]
        if part.unknown:
            return "expected the gradient of one of the"
        if part.groups is not None and any(one.kind == "embedding" for one in part.parameters):
            return "expected a dense gradient, got a sparse one"
        trained = [one for one in part.parameters if not one.frozen]
        compressed = any(
            isinstance(settings.codec_of(one.name, one.elements), dr.Codec) for one in trained
        )
        hierarchical = isinstance(settings.communicator, dr.Hierarchical)
        partial = len(program.ranks_of(part)) < program.size
        if hierarchical and partial and compressed:
            return "Hierarchical: expected a compressor for all ranks"
    return None
