"""Random programs over the API for TensorFlow, and which of their steps must be refused.

A program is data. It is equal on all ranks, and it is printed if it fails. Its gradients depend on
its seed alone, so every rank knows the gradients of all ranks.
"""

import dataclasses
import math

import numpy as np

import deepreduce_hvd as dr

#: sparsifiers that a communicator accepts: those with a fixed k, or those that draw alike on all
#: ranks
FIXED_K = (dr.TopK, dr.RandomK, dr.ChunkTopK, dr.NoneSparsifier)
DRAWN = (dr.RandomK, dr.NoneSparsifier)
#: stages that lose nothing
WHOLE = (dr.NoneSparsifier(), dr.TopK(1.0), dr.RandomK(1.0), dr.Threshold(0))
LOSSLESS = (dr.RawValue, dr.Deflate)


@dataclasses.dataclass(frozen=True)
class Variable:
    name: str
    shape: tuple
    dtype: str

    @property
    def elements(self):
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """The settings of a compressor.

    ``variables`` are numbers of variables. ``ranks`` are those of its process set, None for all.
    """

    variables: tuple
    codec: object
    memory: object
    communicator: object
    dense_below: int
    seed: int
    ranks: tuple = None

    @property
    def is_a_plain_sum(self):
        """True if a reduction is the sum of this step's gradients, without any loss."""
        scheme = getattr(self.communicator, "across", self.communicator)
        # with CLTK, elements that are zero on the leader are not selected
        whole = DRAWN if scheme == dr.CLTK() else dr.Sparsifier
        return (
            self.memory == dr.NoMemory()
            and self.codec.sparsifier in WHOLE
            and isinstance(self.codec.sparsifier, whole)
            and not isinstance(self.codec.index, dr.Bloom)
            and isinstance(self.codec.value, LOSSLESS)
            and scheme != dr.SplitAllgather(dense=4)
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One reduction of some gradients.

    ``way`` is "tape", "allreduce_gradients", "allreduce" (each gradient alone) or "fit". ``absent``
    are the sources whose gradient is None. ``sliced`` are those whose gradient is slices. ``bound``
    is whether the compressor is bound to the sources. ``groups`` are Horovod's, with numbers of
    variables in place of variables.
    """

    compressor: int
    way: str
    sources: tuple
    absent: tuple = ()
    sliced: tuple = ()
    op: str = "Average"
    groups: object = None
    bound: bool = False

    @property
    def present(self):
        return [source for source in self.sources if source not in self.absent]


@dataclasses.dataclass(frozen=True)
class Function:
    """Parts that are reduced together.

    ``mode`` is "eager", "graph" or "xla", or "unrolled" or "loop" for a graph that runs its parts
    twice.
    """

    mode: str
    parts: tuple

    @property
    def turns(self):
        return 2 if self.mode in ("unrolled", "loop") else 1


@dataclasses.dataclass(frozen=True)
class Fit:
    """A Keras model of some variables.

    ``passes`` is the number of backward passes per step. ``average`` is whether their gradients are
    averaged. ``executions`` is the number of batches that Keras runs in one call of a graph.
    """

    part: Part
    optimizer: str
    passes: int = 1
    average: bool = False
    eagerly: bool = False
    executions: int = 1


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program.

    ``kind`` is "run" (a function), "trace" (it again, then run it), "fit", "save", "load" or
    "stats". ``what`` is the number of the function, fit or compressor. ``way`` is how a state is
    saved or loaded. ``bad`` is (rank, variable, value) of an element that is not finite.
    """

    kind: str
    what: int
    turns: int = 1
    way: str = None
    bad: tuple = None


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    size: int
    variables: tuple
    compressors: tuple
    functions: tuple
    fits: tuple
    steps: tuple

    def __str__(self):
        lines = [f"program of seed {self.seed} on {self.size} ranks"]
        for field in ("variables", "compressors", "functions", "fits", "steps"):
            for number, one in enumerate(getattr(self, field)):
                lines.append(f"  {field} {number}: {one}")
        return "\n".join(lines)

    def ranks(self, compressor):
        """Return the ranks of a compressor, given by its number."""
        chosen = self.compressors[compressor].ranks
        return tuple(range(self.size)) if chosen is None else chosen

    def is_dense(self, compressor, variable):
        """Return whether a variable's gradient is sent uncompressed."""
        return self.variables[variable].elements < self.compressors[compressor].dense_below

    def gradient(self, where, rank, variable, sliced=False, bad=None):
        """Return a gradient in float64: an array in the variable's shape, or (rows, their slices).

        Args:
            where: the numbers of the step, the turn and the part.
            bad: (rank, variable, value) of an element that is not finite.
        """
        shape = self.variables[variable].shape
        random = np.random.default_rng([self.seed, *where, rank, variable])
        if sliced:
            rows = random.integers(0, shape[0], random.integers(0, 6))
            values = random.integers(-16, 17, (rows.size, *shape[1:])) / 8
            if random.random() < 0.5:  # other slices of the row may then cancel these
                values = np.round(values)
            self._spoil(values, rank, variable, bad)
            return rows, values
        kind = random.choice(["normal", "grid", "rare", "zero"], p=[0.5, 0.25, 0.15, 0.1])
        values = random.standard_normal(shape) ** 3
        if kind == "grid":  # many of equal magnitude
            values = np.asarray(random.integers(-8, 9, shape) / 8)
        elif kind == "rare":
            values = np.where(random.random(shape) < 0.1, values, 0.0)
        elif kind == "zero":
            values = np.zeros(shape)
        values = np.array(values)
        self._spoil(values, rank, variable, bad)
        return values

    @staticmethod
    def _spoil(values, rank, variable, bad):
        if bad is not None and (rank, variable) == bad[:2] and values.size:
            values.reshape(-1)[-1] = bad[2]


class Refusals:
    """Knows which steps must be refused, by words that the error must contain.

    Everything else must work.
    """

    def __init__(self, program):
        self._program = program
        self._traced = {}  # key by which Horovod traces eager tapes -> sources of the first

    def of_compressor(self, compressor):
        sparsifier, communicator = compressor.codec.sparsifier, compressor.communicator
        if isinstance(communicator, dr.Hierarchical):
            communicator = communicator.across
        if isinstance(communicator, dr.GTopK) and not isinstance(sparsifier, FIXED_K):
            return ("InvalidArgumentError", "fixed k")
        if isinstance(communicator, dr.SharedRandomK) and not isinstance(sparsifier, DRAWN):
            return ("InvalidArgumentError", "RandomK or NoneSparsifier")
        return None

    def of_step(self, step):
        """Return words or None. Must be called once for each step, in order."""
        if step.kind == "load" and step.way.startswith("fresh"):  # it is new to Horovod
            self._traced = {key: one for key, one in self._traced.items() if key[0] != step.what}
        if step.kind not in ("run", "trace"):
            return None
        function = self._program.functions[step.what]
        found = [self._of_part(part, function.mode) for part in function.parts]
        return next((words for words in found if words), None)

    def _of_part(self, part, mode):
        compressor = self._program.compressors[part.compressor]
        if mode == "xla":
            return ("InvalidArgumentError", "without XLA")
        if set(part.present) - set(compressor.variables):
            return ("InvalidArgumentError", "all variables whose gradients Horovod reduces")
        if part.way == "allreduce" and not part.bound and self._alike(part, compressor):
            return ("InvalidArgumentError", "could be that of")
        if part.way == "allreduce_gradients" and self._takes_no_slices(part, compressor):
            return ("InvalidArgumentError", "for slices")
        if part.way == "tape" and mode == "eager" and not part.bound:
            return self._traced_for_others(part)
        return None

    def _alike(self, part, compressor):
        """Return whether hvd.allreduce gets a gradient of a shape that two variables have."""
        shapes = [self._program.variables[number].shape for number in compressor.variables]
        wanted = [self._program.variables[number].shape for number in part.present]
        return any(shapes.count(shape) > 1 for shape in wanted)

    def _takes_no_slices(self, part, compressor):
        known = type(compressor.memory) in (dr.NoMemory, dr.Residual)
        if known and isinstance(compressor.communicator, dr.Allgather):
            return False
        return any(not self._program.is_dense(part.compressor, one) for one in part.sliced)

    def _traced_for_others(self, part):
        """Return words if Horovod traced an equal tape for other variables, else None.

        Horovod traces eager tapes of equal gradients once, for the variables of the first one.
        """
        if len(self._program.ranks(part.compressor)) == 1:
            return None
        variables = self._program.variables
        key = (
            part.compressor, part.op, repr(part.groups), bool(part.sliced),
            tuple((variables[one].shape, variables[one].dtype,
                   one in part.absent, one in part.sliced)
                  for one in part.sources),
        )  # fmt: skip
        first = self._traced.setdefault(key, part.sources)
        for traced, own in zip(first, part.sources):
            compressed = not self._program.is_dense(part.compressor, own)
            if traced != own and own not in part.absent and compressed:
                return ("InvalidArgumentError", "bound_to")
        return None


def harmless(function):
    """Return whether a function does nothing before it is refused, so the program can continue."""
    return len(function.parts) == 1 and len(function.parts[0].present) == 1
