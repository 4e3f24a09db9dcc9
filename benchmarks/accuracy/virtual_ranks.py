"""Virtual ranks in one process, with the package's own codecs, memories and communicators."""

import zlib

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd.adapters.embedding_tables import has_bias, looks_like_table
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.planning.policies import rows_codec


class VirtualRanks:
    """What ``size`` ranks do between backward and the optimizer's step.

    Args:
        size: number of ranks.
        shapes: {parameter name: number of elements}.
        codec: codec of the compressed tensors; or a dictionary with the codec of each parameter
            that has one; or None, which averages the gradients uncompressed.
        memory: as of :class:`~deepreduce_hvd.Compressor`; or a dictionary with the memory of each
            parameter that has another one than the default.
        communicator: as of :class:`~deepreduce_hvd.Compressor`.
        dense_below: tensors with fewer elements are not compressed.
        seed: seed of all random choices.
        columns: {parameter name: number of columns} of the parameters that get the codec "rows" if
            the first gradients show that they are embedding tables.

    Attributes:
        large: {name: elements} of the tensors that a codec can compress.
        codecs, memories: {name: codec} and {name: memory} of the tensors that are compressed.
        sent_bytes: bytes that one rank has handed to collectives so far, the mean over the ranks.
        steps: number of steps so far.
        tables: names of the embedding tables that were found.
        undecided: {name: number of columns} of the parameters that may be found to be one.
    """

    def __init__(
        self,
        size,
        shapes,
        codec,
        memory=None,
        communicator=None,
        dense_below=1024,
        seed=0,
        columns=None,
    ):
        self.size = size
        self.communicator = dr.Allgather() if communicator is None else communicator
        self.seed = seed
        # in the order in which backward makes gradients ready: that of a bucket's members
        self.large = {
            name: shapes[name] for name in reversed(shapes) if shapes[name] >= dense_below
        }
        codec_of = codec if isinstance(codec, dict) else dict.fromkeys(shapes, codec)
        self.codecs = {name: codec_of[name] for name in self.large if codec_of.get(name)}
        self.compressed = {name: self.large[name] for name in self.codecs}
        default = dr.Residual() if memory is None or isinstance(memory, dict) else memory
        memory_of = memory if isinstance(memory, dict) else {}
        self.memories = {name: memory_of.get(name, default) for name in self.codecs}
        self._states = [
            {
                name: tuple(np.zeros(d, dtype=np.float32) for _ in self.memories[name].state)
                for name, d in self.compressed.items()
            }
            for _ in range(size)
        ]
        self._thresholds = [
            {name: np.zeros(1, dtype=np.float32) for name in self.compressed} for _ in range(size)
        ]
        self.sent_bytes = 0.0
        self.steps = 0
        self.undecided = dict(columns or {})
        self._used_before = [{} for _ in range(size)]  # of each rank: {name: rows that were used}
        self._names = set(shapes)
        self.tables = []

    def mean(self, gradients):
        """Exchange one step's gradients.

        Args:
            gradients: for each rank, {parameter name: (d,) float32 array}.

        Returns:
            {parameter name: (d,) float32}, the mean over the ranks as every rank receives it.
        """
        result = {}
        for name in gradients[0]:
            if name not in self.compressed:
                total = np.sum([own[name] for own in gradients], axis=0)
                result[name] = total / np.float32(self.size)
                self.sent_bytes += total.nbytes
        if self.compressed:
            result.update(self._exchange(gradients))
        self.steps += 1
        self._use_rows_of_tables(gradients)
        return result

    def _use_rows_of_tables(self, gradients):
        """Give the codec "rows" to the tables that the ranks' first gradients show.

        Their memories are added to the next gradients, and empty from then on.
        """
        for name, columns in list(self.undecided.items()):
            looks = [
                self._look(before, name, own[name].reshape(-1, columns).any(axis=1))
                for before, own in zip(self._used_before, gradients)
            ]
            known = [one for one in looks if one is not None]
            if known:
                del self.undecided[name]
            if known and all(known):
                self.codecs[name], self.memories[name] = rows_codec(), dr.NoMemory()
                self.tables.append(name)

    def _look(self, before, name, used):
        """Return whether a rank's gradient looks like that of a table; None if it does not tell."""
        if not used.any():
            return None
        biased = has_bias(name, self._names)
        found = looks_like_table(used, before.get(name), biased)
        before[name] = used
        return found

    def _with_memory_of_others(self, gradient, rank, name):
        """Return a gradient, plus a memory that its codec does not use, which is empty after it."""
        if self.memories[name].state or not self._states[rank][name]:
            return gradient
        (residual,), self._states[rank][name] = self._states[rank][name], ()
        return gradient + residual

    def _parts(self):
        """Return (codec, memory, names) of each bucket: its members have the same stages."""
        parts = {}
        for name, codec in self.codecs.items():
            memory = self.memories[name]
            parts.setdefault(repr((codec, memory)), (codec, memory, []))[2].append(name)
        return list(parts.values())

    def _buckets(self, gradients, codec, memory, names):
        """Return the bucket of each rank with these members."""
        buckets = []
        for rank, own in enumerate(gradients):
            members = []
            for name in names:
                gradient = self._with_memory_of_others(own[name], rank, name)  # may empty the state
                members.append(
                    BucketMember(
                        name,
                        gradient,
                        self._states[rank][name],
                        zlib.crc32(name.encode()),
                        threshold=self._thresholds[rank][name],
                    )
                )
            buckets.append(Bucket(codec, memory, members, self.seed, self.steps, rank))
        return buckets

    def _exchange(self, gradients):
        result = {}
        for codec, memory, names in self._parts():
            simulator = Simulator(self.size)
            buckets = self._buckets(gradients, codec, memory, names)
            outcomes = simulator.run(self.communicator, buckets)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            self.sent_bytes += float(simulator.sent_bytes.mean())
            for number, name in enumerate(names):
                result[name] = np.zeros(self.compressed[name], dtype=np.float32)
                outcomes[0].add_to(number, result[name], 1 / self.size)
        return result


class EstimatingRanks(VirtualRanks):
    """Ranks with EF21 (Richtarik et al. 2021) in place of a memory.

    Each rank keeps an estimate of its gradient and sends the compressed difference to it. All ranks
    add the mean of the differences to the sum of the estimates, which is what the optimizer gets.
    With a momentum below 1, a rank estimates an average of its gradients (EF21-SGDM; Fatkhullin et
    al. 2023): average += momentum * (gradient - average).
    """

    def __init__(self, *arguments, momentum=1.0, **settings):
        super().__init__(*arguments, **settings)
        self._momentum = np.float32(momentum)
        self._estimates = [
            {name: np.zeros(d, dtype=np.float32) for name, d in self.compressed.items()}
            for _ in range(self.size)
        ]
        self._averages = [None] * self.size
        self._total = {name: np.zeros(d, dtype=np.float32) for name, d in self.compressed.items()}

    def _exchange(self, gradients):
        differences = []
        for rank, own in enumerate(gradients):
            if self._averages[rank] is None:
                self._averages[rank] = {name: own[name].copy() for name in self.compressed}
            average = self._averages[rank]
            for name in self.compressed:
                average[name] += self._momentum * (own[name] - average[name])
            differences.append(
                {name: average[name] - self._estimates[rank][name] for name in self.compressed}
            )
        mean = super()._exchange(differences)
        for rank, difference in enumerate(differences):
            for name in self.compressed:
                unsent = self._states[rank][name][0]
                self._estimates[rank][name] += difference[name] - unsent
                unsent[:] = 0
        for name, change in mean.items():
            self._total[name] += change
        return {name: total.copy() for name, total in self._total.items()}
