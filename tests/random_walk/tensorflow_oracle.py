"""The expected results of a random program, from one process that knows all gradients.

Payloads of Allgather and of slices go through the NumPy specification (deepreduce_hvd.reference).
Other communicators go through the simulator of all ranks, which tests/test_communicators.py
compares with other oracles. In addition, and without either of them, the mass of each variable is
counted.
"""

import zlib

import ml_dtypes
import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd import reference
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator

NUMPY = {
    "float32": np.float32, "float16": np.float16, "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}
#: half the relative distance to the next number
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-24}


class Kept:
    """What one compressor keeps for one variable on each of its ranks."""

    def __init__(self, arrays):
        self.arrays = arrays  # rank -> tuple of (d,) float32
        self.steps = dict.fromkeys(arrays, 0)

    def copy(self):
        twin = Kept(
            {rank: tuple(one.copy() for one in arrays) for rank, arrays in self.arrays.items()}
        )
        twin.steps = dict(self.steps)
        return twin


class Mass:
    """The balance of one variable: inputs minus results. The residuals must keep it."""

    def __init__(self, elements):
        self.owed = np.zeros(elements)
        self.tolerance = 0.0

    def start(self, kept):
        """Reset the balance to what is kept."""
        self.owed = kept.astype(np.float64)
        self.tolerance = 1e-6 * np.abs(kept).max(initial=0)


class Oracle:
    """The state of all ranks, and the expected result of each reduction."""

    def __init__(self, program):
        self.program = program
        self.kept = []
        self.mass = []
        for number, compressor in enumerate(program.compressors):
            kept = {}
            for variable in compressor.variables:
                elements = program.variables[variable].elements
                count = 0 if program.is_dense(number, variable) else len(compressor.memory.state)
                ranks = program.ranks(number)
                kept[variable] = Kept(
                    {
                        rank: tuple(np.zeros(elements, np.float32) for _ in range(count))
                        for rank in ranks
                    }
                )
            self.kept.append(kept)
            self.mass.append(
                {one: Mass(program.variables[one].elements) for one in compressor.variables}
            )

    # --- how results are compared ---

    def keeps_everything(self, compressor):
        memory = self.program.compressors[compressor].memory
        return memory.state and (
            memory.state[0] == "kept" or memory in (dr.Residual(), dr.LowPass(1))
        )

    def known(self, compressor):
        """Return how well results are known: "exactly", "closely" or "to rounding of sums".

        Horovod's own sums of three numbers depend on their order, and Auto on measured seconds.
        What is encoded or selected after such a sum may differ, but the mass must balance.
        """
        communicator = self.program.compressors[compressor].communicator
        if isinstance(communicator, dr.Auto):
            return "to rounding of sums"
        if len(self.program.ranks(compressor)) <= 2:
            return "exactly"
        if isinstance(communicator, dr.Hierarchical):
            return "to rounding of sums"
        return "closely" if isinstance(communicator, (dr.CLTK, dr.SharedRandomK)) else "exactly"

    # --- a reduction ---

    def reduce(self, part, gradients):
        """Return the results of one reduction, {variable: array of its shape and dtype}.

        Args:
            gradients: {rank: {variable: array of the variable's dtype, or (rows, slices)}}.
        """
        ranks = self.program.ranks(part.compressor)
        if self._sends_nothing(part):
            return {one: self._whole(one, gradients[ranks[0]][one]) for one in part.present}
        results = {}
        for message in self._messages(part):
            compressed = [one for one in message if not self.program.is_dense(part.compressor, one)]
            for variable in set(message) - set(compressed):
                results[variable] = self.plain_sum(part, variable, gradients)
            if not compressed:
                continue
            as_slices = part.way == "allreduce_gradients" and compressed[0] in part.sliced
            exchange = self._slices if as_slices else self._exchange
            for variable, total in exchange(part, compressed, gradients).items():
                results[variable] = self._typed(variable, total)
        return results

    def _sends_nothing(self, part):
        """Return whether one rank is alone; hvd.allreduce compresses also then."""
        return len(self.program.ranks(part.compressor)) == 1 and part.way != "allreduce"

    def _messages(self, part):
        """Return the variables of each of Horovod's messages."""
        present = part.present
        if part.groups is None:
            return [[one] for one in present]
        if isinstance(part.groups, int):
            return [list(one) for one in np.array_split(np.array(present), part.groups)]
        named = [one for group in part.groups for one in group]
        return [list(group) for group in part.groups] + [
            [one] for one in present if one not in named
        ]

    def _typed(self, variable, total):
        variable = self.program.variables[variable]
        with np.errstate(over="ignore"):
            return total.astype(NUMPY[variable.dtype]).reshape(variable.shape)

    def _whole(self, variable, gradient):
        """Return a gradient as an array. Slices of the same row are added up."""
        if not isinstance(gradient, tuple):
            return gradient
        whole = np.zeros(
            self.program.variables[variable].shape, NUMPY[self.program.variables[variable].dtype]
        )
        for row, one in zip(*gradient):
            whole[row] += one
        return whole

    def _flat32(self, variable, gradient):
        return self._whole(variable, gradient).astype(np.float32).reshape(-1)

    def _scale(self, part):
        return 1 / len(self.program.ranks(part.compressor)) if part.op == "Average" else 1.0

    def plain_sum(self, part, variable, gradients):
        """Return the result of a reduction without loss, up to rounding."""
        wide = np.float64 if self.program.variables[variable].dtype == "float64" else np.float32
        total = 0
        for rank in self.program.ranks(part.compressor):
            total = total + self._whole(variable, gradients[rank][variable]).astype(wide)
        return self._typed(variable, np.asarray(total * wide(self._scale(part))))

    def _settings(self, part, variable):
        """Return (compressor, kept, key, code of the dtype)."""
        compressor = self.program.compressors[part.compressor]
        spec = self.program.variables[variable]
        return (
            compressor,
            self.kept[part.compressor][variable],
            zlib.crc32(spec.name.encode()),
            CODES[spec.dtype],
        )

    def _exchange(self, part, message, gradients):
        """Return {variable: (d,) float32} of one message."""
        compressor = self.program.compressors[part.compressor]
        if isinstance(compressor.communicator, dr.Allgather):
            return {one: self._gathered(part, one, gradients) for one in message}
        return self._simulated(part, message, gradients)

    def _gathered(self, part, variable, gradients):
        compressor, kept, key, code = self._settings(part, variable)
        stages = (
            compressor.codec.sparsifier,
            compressor.codec.index,
            compressor.codec.value,
            compressor.memory,
        )
        payloads = []
        for rank in self.program.ranks(part.compressor):
            payload, state = reference.encode(
                stages, self._flat32(variable, gradients[rank][variable]), code, kept.arrays[rank],
                compressor.seed, kept.steps[rank], key, rank,
            )  # fmt: skip
            kept.arrays[rank] = tuple(one.copy() for one in state)
            kept.steps[rank] += 1
            payloads.append(payload)
        return self._decoded(part, variable, payloads)

    def _decoded(self, part, variable, payloads):
        total = np.zeros(self.program.variables[variable].elements, np.float32)
        reference.decode_sum(payloads, total, self._scale(part))
        return total

    def _simulated(self, part, message, gradients):
        compressor = self.program.compressors[part.compressor]
        ranks, buckets = self.program.ranks(part.compressor), []
        for rank in ranks:
            members = []
            for variable in message:
                _, kept, key, code = self._settings(part, variable)
                flat = self._whole(variable, gradients[rank][variable]).reshape(-1)
                flat = flat.view(np.uint16) if code == CODES["bfloat16"] else flat
                own = tuple(one.copy() for one in kept.arrays[rank])
                members.append(
                    BucketMember(self.program.variables[variable].name, flat, own, key, code)
                )
            step = self.kept[part.compressor][message[0]].steps[rank]
            buckets.append(
                Bucket(compressor.codec, compressor.memory, members, compressor.seed, step, rank)
            )
        # Auto measures. Each scheme that it may choose gives the same result, up to rounding.
        scheme = (
            dr.Allgather()
            if isinstance(compressor.communicator, dr.Auto)
            else compressor.communicator
        )
        sums = Simulator(len(ranks)).run(scheme, buckets)
        totals = {}
        for place, variable in enumerate(message):
            totals[variable] = np.zeros(self.program.variables[variable].elements, np.float32)
            sums[0].add_to(place, totals[variable], self._scale(part))
            kept = self.kept[part.compressor][variable]
            for rank, bucket in zip(ranks, buckets):
                kept.arrays[rank] = bucket.members[place].state
                kept.steps[rank] += 1
        return totals

    def _slices(self, part, message, gradients):
        (variable,) = message
        compressor, kept, key, code = self._settings(part, variable)
        elements = self.program.variables[variable].elements
        payloads, stages = [], (compressor.codec.index, compressor.codec.value)
        for rank in self.program.ranks(part.compressor):
            rows, values = gradients[rank][variable]
            residual = (
                kept.arrays[rank][0].copy() if kept.arrays[rank] else np.zeros(elements, np.float32)
            )
            merged = residual.copy().reshape(self.program.variables[variable].shape)
            for row, one in zip(rows, values):
                merged[row] += one.astype(np.float32)
            touched = np.zeros(merged.shape, bool)
            touched[rows] = True
            merged, touched = merged.reshape(-1), touched.reshape(-1)
            at = np.flatnonzero(touched & (merged != 0)).astype(np.uint32)
            payload, lacks, (added, added_values) = reference.encode_sparse(
                stages, at, merged[at], elements, code, compressor.seed, kept.steps[rank], key, rank
            )
            if kept.arrays[rank] and np.isfinite(merged[at]).all():
                residual[touched] = 0
                residual[at] = lacks
                residual[added] += added_values
                kept.arrays[rank] = (residual,)
            kept.steps[rank] += 1
            payloads.append(payload)
        total = self._decoded(part, variable, payloads)
        if np.isnan(total).any():  # a void step is marked by one slice of NaN
            total[:] = 0
            total[0] = np.nan
        return {variable: total}

    # --- mass ---

    def count(self, part, gradients, results):
        """Add the inputs and the results, {variable: array}, of one reduction to the balance."""
        ranks = self.program.ranks(part.compressor)
        if not self.keeps_everything(part.compressor) or self._sends_nothing(part):
            return
        for variable in part.present:
            if self.program.is_dense(part.compressor, variable):
                continue
            mass = self.mass[part.compressor][variable]
            came_in = [
                self._flat32(variable, gradients[rank][variable]).astype(np.float64)
                for rank in ranks
            ]
            handed_out = results[variable].astype(np.float64).reshape(-1) / self._scale(part)
            with np.errstate(invalid="ignore"):
                mass.owed = mass.owed + sum(came_in) - handed_out  # NaN of a void step
            largest = max(np.abs(one).max(initial=0) for one in (*came_in, mass.owed, handed_out))
            rounding = ROUNDING[self.program.variables[variable].dtype]
            mass.tolerance += (
                2 * rounding * np.abs(handed_out).max(initial=0) + 2.0**-20 * len(ranks) * largest
            )

    def missing_mass(self, compressor, variable, kept):
        """Return (largest difference from the balance, tolerance), or None if within rounding.

        ``kept`` is what all ranks keep.
        """
        mass = self.mass[compressor][variable]
        if not np.isfinite(mass.owed).all():  # what a void step took is lost
            mass.start(kept)
        difference = np.abs(mass.owed - kept).max(initial=0)
        return None if difference <= mass.tolerance else (difference, mass.tolerance)

    def restart_mass(self, compressor):
        for variable, kept in self.kept[compressor].items():
            if self.keeps_everything(compressor) and not self.program.is_dense(
                compressor, variable
            ):
                self.mass[compressor][variable].start(sum(one[0] for one in kept.arrays.values()))
