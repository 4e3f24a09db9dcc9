"""Generate random programs over the API for TensorFlow, each from its seed alone."""

import dataclasses
import itertools
import math

import numpy as np
from codecs_table import INDEX_WITH_MEMORY as INDEX, VALUE_WITH_MEMORY as VALUE
from own_stages import OwnResidual
from tensorflow_program import (
    DRAWN,
    FIXED_K,
    WHOLE,
    Compressor,
    Fit,
    Function,
    Part,
    Program,
    Refusals,
    Step,
    Variable,
    harmless,
)

import deepreduce_hvd as dr

SHAPES = ((), (1,), (0,), (1, 1), (7, 5), (40,), (12, 8), (8, 12), (96,), (30, 16))
DTYPES = ("float32",) * 6 + ("float16", "bfloat16", "float64")
MEMORIES = (
    dr.Residual(), dr.Residual(), dr.Residual(), dr.NoMemory(), dr.LowPass(0.3), dr.LowPass(1),
    dr.MomentumCorrection(0.9), dr.MomentumCorrection(0), OwnResidual(),
)  # fmt: skip
SPARSIFIERS = (
    dr.TopK(0.1), dr.TopK(k=3), dr.TopK(1.0), dr.TopK(0.02, warmup_steps=3, warmup_ratio=0.5),
    dr.RandomK(0.2), dr.RandomK(1.0), dr.Threshold(0), dr.Threshold(0.4), dr.ChunkTopK(0.1),
    dr.NoneSparsifier(),
)  # fmt: skip
#: how a state is saved -> how it may be loaded: in place, from a list of all ranks' states, from
#: the states of more ranks, or into a new compressor
LOADED = {
    "state": ("state", "list", "more_ranks", "fresh"),
    "checkpoint": ("checkpoint", "fresh_checkpoint"),
}
OPTIMIZERS = ("SGD", "Momentum", "Adam", "Adagrad", "RMSprop")


def process_sets(size):
    """Return the ranks of the process sets, besides that of all ranks, for compressors."""
    if size == 1:
        return [None]
    return list(itertools.combinations(range(size), size - 1))


class Generator:
    """Generates the program of a seed."""

    def __init__(self, seed, size):
        self._random = np.random.default_rng([seed, 2024])
        self._seed = seed
        self._size = size

    def _chance(self, probability):
        return self._random.random() < probability

    def _one(self, options):
        return options[self._random.integers(len(options))]

    def _some(self, options, least=1):
        """Return at least ``least`` of ``options``, in random order."""
        count = self._random.integers(least, len(options) + 1)
        return tuple(options[place] for place in self._random.permutation(len(options))[:count])

    def program(self):
        variables = self._variables()
        compressors = self._compressors(variables)
        self._program = Program(self._seed, self._size, variables, compressors, (), (), ())
        functions = [self._function() for _ in range(self._random.integers(1, 4))]
        functions += self._twins()
        fits = tuple(self._fit() for _ in range(self._one((0, 0, 0, 1, 1, 2))))
        self._program = dataclasses.replace(self._program, functions=tuple(functions), fits=fits)
        return dataclasses.replace(self._program, steps=self._steps())

    def _variables(self):
        shapes = [self._one(SHAPES) for _ in range(self._random.integers(1, 4))]
        dtypes = [self._one(DTYPES) for _ in range(2)]
        return tuple(
            Variable(
                f"{self._one(('layer/a', 'layer_a', 'b'))}{number}",
                self._one(shapes),
                self._one(dtypes),
            )
            for number in range(self._random.integers(2, 6))
        )

    def _compressors(self, variables):
        numbers = self._random.permutation(len(variables)).tolist()
        cut = self._random.integers(1, len(numbers)) if self._chance(0.4) else 0
        return tuple(
            self._compressor(tuple(part)) for part in (numbers[:cut], numbers[cut:]) if part
        )

    def _compressor(self, numbers):
        communicator = dr.Allgather() if self._chance(0.5) else self._communicator()
        ranks = None
        if self._chance(0.15) and not isinstance(communicator, dr.Hierarchical):
            ranks = self._one(process_sets(self._size))
        codec, memory = self._codec(communicator), self._one(MEMORIES)
        if self._chance(0.1):
            codec, memory = dr.Codec(self._sparsifier(communicator, WHOLE)), dr.NoMemory()
        return Compressor(
            numbers, codec, memory, communicator, self._one((0, 0, 0, 0, 1, 20, 20, 50, 1024)),
            int(self._random.integers(3)), ranks,
        )  # fmt: skip

    def _codec(self, communicator):
        sparsifier = self._sparsifier(communicator, SPARSIFIERS)
        if self._chance(0.2):
            return dr.Codec(sparsifier)
        return dr.Codec(
            sparsifier, self._one(list(INDEX.values())), self._one(list(VALUE.values()))
        )

    def _sparsifier(self, communicator, options):
        """Return a sparsifier, usually one that the communicator accepts."""
        kinds = dr.Sparsifier
        if not isinstance(communicator, dr.Allgather) and not self._chance(0.1):
            kinds = DRAWN if isinstance(communicator, dr.SharedRandomK) else FIXED_K
        return self._one([one for one in options if isinstance(one, kinds)])

    def _communicator(self):
        return self._one([
            dr.SplitAllgather(), dr.SplitAllgather(dense=None), dr.SplitAllgather(dense=4),
            dr.RecursiveDoubling(), dr.GTopK(), dr.GTopK(form="tree"), dr.CLTK(),
            dr.SharedRandomK(), dr.Auto(), dr.Hierarchical(dr.GTopK(), self._size),
            dr.Hierarchical(dr.Allgather(), 1), dr.Hierarchical(dr.CLTK(), 1),
        ])  # fmt: skip

    def _function(self):
        mode = self._one(("eager", "eager", "graph", "graph", "graph", "unrolled", "loop"))
        parts = [self._part(mode)]
        if self._chance(0.4):
            other = self._part(mode, parts[0].sources)
            # Horovod numbers uncompressed tensors within a graph: ranks must have equal graphs
            if other is not None and self._ranks(other) == self._ranks(parts[0]):
                parts.append(other)
        if len(parts) == 1 and not parts[0].sliced and self._chance(0.05):
            mode = "xla"
        elif len(self._program.compressors) == 2 and parts[0].way == "tape" and self._chance(0.05):
            stranger = self._one(self._program.compressors[1 - parts[0].compressor].variables)
            sources = (*parts[0].sources, stranger)
            parts = [dataclasses.replace(parts[0], sources=sources, groups=None, bound=False)]
        return Function(mode, tuple(parts))

    def _ranks(self, part):
        return self._program.ranks(part.compressor)

    def _twins(self):
        """Return two eager tapes, each of one of two variables that are alike, or nothing."""
        for number, compressor in enumerate(self._program.compressors):
            kinds = {}
            for one in compressor.variables:
                variable = self._program.variables[one]
                kinds.setdefault((variable.shape, variable.dtype), []).append(one)
            alike = next((ones for ones in kinds.values() if len(ones) > 1), None)
            if alike and self._chance(0.3):
                return [Function("eager", (Part(number, "tape", (one,)),)) for one in alike[:2]]
        return []

    def _part(self, mode, taken=()):
        compressor = int(self._random.integers(len(self._program.compressors)))
        numbers = [
            one for one in self._program.compressors[compressor].variables if one not in taken
        ]
        if not numbers:
            return None
        way = self._one(
            ("tape", "tape", "tape", "allreduce_gradients", "allreduce_gradients", "allreduce")
        )
        sources = self._some(numbers)
        absent = sliced = ()
        if way != "allreduce" and self._chance(0.3):
            absent = self._some(sources, least=0)[: len(sources) - 1]
        rows = [one for one in sources if one not in absent and self._has_rows(one)]
        if way != "allreduce" and mode in ("eager", "graph") and rows and self._chance(0.4):
            sliced = self._some(rows)
        bound = bool(self._chance(0.7)) if way != "allreduce_gradients" else False
        op = self._one(("Average", "Average", "Sum"))
        part = Part(compressor, way, sources, absent, sliced, op, bound=bound)
        if way == "tape" and self._chance(0.5):
            part = dataclasses.replace(part, groups=self._groups(part))
        return part

    def _has_rows(self, number):
        variable = self._program.variables[number]
        return len(variable.shape) > 0 and variable.elements > 0

    def _groups(self, part):
        """Return groups that Horovod accepts.

        It fails on empty groups, and on groups of float64 and other dtypes.
        """
        present = part.present
        if len({self._program.variables[one].dtype == "float64" for one in present}) > 1:
            return None
        if self._chance(0.5):
            return int(self._random.integers(1, len(present) + 1))
        cut = int(self._random.integers(len(present))) if len(present) > 1 else 0
        shuffled = [present[place] for place in self._random.permutation(len(present))]
        groups = [one for one in (shuffled[:cut], shuffled[cut:]) if one]
        return tuple(tuple(one) for one in groups[: 1 + self._chance(0.5)])

    def _fit(self):
        compressor = int(self._random.integers(len(self._program.compressors)))
        sources = self._some(self._program.compressors[compressor].variables)
        part = Part(compressor, "fit", sources, op=self._one(("Average", "Sum")), bound=True)
        if self._chance(0.3):
            part = dataclasses.replace(part, groups=self._groups(part))
        eagerly, passes = bool(self._chance(0.25)), int(self._one((1, 1, 2)))
        executions = 1 if eagerly else int(self._one((1, 1, 2)))
        average = bool(passes > 1 and self._chance(0.5))
        return Fit(part, self._one(OPTIMIZERS), passes, average, eagerly, executions)

    def _steps(self):
        program, refusals = self._program, Refusals(self._program)
        steps, saved = [], {}
        moved = set()  # compressors that have reduced something since they were saved
        for _ in range(self._random.integers(4, 9)):
            choice = self._random.random()
            stale = [one for one in saved if one in moved]
            if stale and self._chance(0.5):
                what = self._one(stale)
                steps.append(Step("load", what, way=self._one(saved.pop(what))))
                refusals.of_step(steps[-1])
                continue
            if choice < 0.15:
                what = int(self._random.integers(len(program.compressors)))
                way = self._one(("state", "checkpoint"))
                saved[what] = LOADED[way]
                moved.discard(what)
                steps.append(Step("save", what, way=way))
                continue
            if choice < 0.2:
                steps.append(Step("stats", int(self._random.integers(len(program.compressors)))))
                continue
            if choice < 0.45 and program.fits:
                what = int(self._random.integers(len(program.fits)))
                steps.append(Step("fit", what, turns=int(self._random.integers(1, 4))))
                moved.add(program.fits[what].part.compressor)
                continue
            what = int(self._random.integers(len(program.functions)))
            function = program.functions[what]
            kind = "trace" if self._chance(0.1) else "run"
            step = Step(kind, what, turns=function.turns, bad=self._bad(function))
            steps.append(step)
            moved |= {part.compressor for part in function.parts}
            if refusals.of_step(step) and not harmless(function):
                break
        return tuple(steps)

    def _bad(self, function):
        if not self._chance(0.12):
            return None
        part = self._one(function.parts)
        rank = self._one(self._program.ranks(part.compressor))
        return rank, self._one(part.present), self._one((math.nan, math.inf, -math.inf))
