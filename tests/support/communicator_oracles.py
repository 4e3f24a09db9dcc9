"""Expected results of every communicator, computed in NumPy by one process for all ranks."""

import itertools

import numpy as np
from simulated_ranks import RAW

import deepreduce_hvd as dr
from deepreduce_hvd import reference


class Oracle:
    """The dense state of all ranks, and encoding in NumPy."""

    def __init__(self, scheme, codec, gradients, seed=3, step=0):
        self.codec, self.seed, self.step, self.d = codec, seed, step, gradients[0].size
        self.scheme, self.size = scheme, len(gradients)
        self.residuals = [whole.copy() for whole in gradients]
        self.gradients = gradients

    def select(self, rank):
        found = reference.select((self.codec.sparsifier, dr.Residual()), self.gradients[rank], (np.zeros(self.d, dtype=np.float32),),
                                 None, self.seed, self.step, 77)  # fmt: skip
        self.residuals[rank] = found[2][0]
        return found[0], found[1]

    def coded(self, part, stage, group, owner=None, start=0, d=None, stages=None):
        """Return the decoded partial sum (indices, values); rank ``owner`` keeps the error."""
        indices, values = part
        stages = stages or (self.codec.index, self.codec.value)
        payload, lacks, (added, added_values) = reference.encode_sparse(
            stages,
            indices,
            values,
            self.d if d is None else d,
            0,
            self.seed,
            self.step,
            77 | stage << 32,
            group,
        )
        if owner is not None:
            self.residuals[owner][indices + start] += lacks
            self.residuals[owner][added + start] += added_values
        return reference.decode_sparse(payload)

    @staticmethod
    def added(low, high, d):
        total, support = np.zeros(d, dtype=np.float32), np.zeros(d, dtype=bool)
        for indices, values in (low, high):
            total[indices] = np.where(support[indices], total[indices] + values, values)
            support[indices] = True
        at = np.flatnonzero(support & (total != 0)).astype(np.uint32)
        return at, total[at]

    def trimmed(self, part, owner, k):
        if k is None or part[0].size <= k:
            return part
        order = np.lexsort((part[0], -np.abs(part[1])))
        kept, dropped = np.sort(order[:k]), order[k:]
        self.residuals[owner][part[0][dropped]] += part[1][dropped]
        return part[0][kept], part[1][kept]

    def doubling(self, k, coded_last):
        """Replay the tree: pairs of blocks of ranks are merged.

        The lowest rank of a block keeps the error of its sum.
        """
        power = 1
        while 2 * power <= self.size:
            power *= 2
        parts = {rank: self.select(rank) for rank in range(self.size)}
        stage = 0

        def meet(low, high):
            both = [self.coded(parts[rank], stage, rank, owner=rank) for rank in (low, high)]
            parts[low] = self.trimmed(self.added(*both, self.d), low, k)

        for extra in range(power, self.size):
            meet(extra - power, extra)
        distance = 1
        while distance < power:
            stage += 1
            for low in range(0, power, 2 * distance):
                meet(low, low + distance)
            distance *= 2
        if coded_last or self.size > power:
            parts[0] = self.coded(parts[0], stage + 1, 0, owner=0)
        return parts[0]

    def total(self):
        out = np.zeros(self.d, dtype=np.float32)
        if self.scheme.startswith("split"):
            own = [self.select(rank) for rank in range(self.size)]
            bounds = [owner * self.d // self.size for owner in range(self.size + 1)]
            for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
                part = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.float32)
                for rank, (indices, values) in enumerate(own):
                    here = (indices >= start) & (indices < end)
                    cut = indices[here] - np.uint32(start), values[here]
                    if cut[0].size:
                        cut = self.coded(
                            cut,
                            owner,
                            rank,
                            rank,
                            start,
                            end - start,
                            RAW if owner == rank else None,
                        )
                    part = self.added(part, cut, end - start)
                stages, d = None, end - start
                dense = (
                    dr.QSGD(bits=4, bucket=1024)
                    if self.scheme == "split_dense_4"
                    else self.codec.value
                )
                if self.scheme != "split_never_dense" and 0 < part[0].size < d:
                    index_bits = np.log2(d / part[0].size) + 1 / np.log(2)
                    if (
                        part[0].size * (index_bits + self.codec.value.bits_per_value())
                        >= d * dense.bits_per_value()
                    ):
                        values = np.zeros(d, dtype=np.float32)
                        values[part[0]] = part[1]
                        part, stages = (
                            (np.arange(d, dtype=np.uint32), values),
                            (dr.RawIndex(), dense),
                        )
                indices, values = self.coded(part, 2**31 - 1, owner, owner, start, d, stages)
                out[indices + start] += values
            return out
        if self.scheme in ("recursive_doubling", "gtopk", "gtopk_tree"):
            k = None if self.scheme == "recursive_doubling" else max(1, int(0.1 * self.d))
            indices, values = self.doubling(k, self.scheme == "gtopk_tree")
            out[indices] += values
            return out
        if self.scheme == "cltk":
            leader = self.step % self.size
            chosen = self.codec.sparsifier.select(self.gradients[leader], None)
        else:
            chosen = self.select(0)[0]
        for rank in range(self.size):
            out[chosen] += self.gradients[rank][chosen]
            self.residuals[rank] = self.gradients[rank].copy()
            self.residuals[rank][chosen] = 0
        return out
