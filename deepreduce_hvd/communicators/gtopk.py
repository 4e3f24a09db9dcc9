"""GTopK: of every partial sum only the largest elements go on."""

import numpy as np

from deepreduce_hvd.communicators.base import Communicator, expect_choice
from deepreduce_hvd.communicators.doubling import butterfly, tree
from deepreduce_hvd.communicators.partial import Partial
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.sparsifiers import ChunkTopK, RandomK, TopK
from deepreduce_hvd.sparsifiers.amount import kept_count


def keep_largest(total, k):
    """(the k elements of ``total`` largest by (|value|, smaller index first), the rest), both ascending."""
    if total.indices.size <= k:
        return total, Partial()
    kept = np.zeros(total.indices.size, dtype=bool)
    kept[np.argsort(-np.abs(total.values), kind="stable")[:k]] = True
    return Partial(total.indices[kept], total.values[kept]), Partial(total.indices[~kept], total.values[~kept])


class GTopK(Communicator):
    """Global top-k (Shi et al. 2019): of every partial sum only the k largest elements go on, k being what the sparsifier keeps of a rank.

    Bytes grow with log2 P only, and all ranks get about k elements instead of up to P k. Unlike the published put-back, which loses an
    element that one merge drops and another lets through, whoever drops a partial sum keeps it in its own memory and nobody else does: nothing
    is lost. ``form``: "butterfly", ceil(log2 P) exchanges between pairs, or "tree", up to rank 0 and back by a broadcast.
    """

    def __init__(self, form="butterfly"):
        self.form = expect_choice("GTopK form", form, ("butterfly", "tree"))

    def check(self, codec, memory):
        if not isinstance(codec.sparsifier, (TopK, ChunkTopK, RandomK)):
            raise InvalidArgument(f"GTopK: expected a sparsifier with a fixed k (TopK, ChunkTopK or RandomK), got {codec.sparsifier!r}")

    def exchange(self, job, channel):
        k = sum(_kept_by(job.codec.sparsifier, job.step, member.gradient.size) for member in job.members)
        form = {"butterfly": butterfly, "tree": tree}[self.form]
        return (yield from form(job, channel, lambda total: keep_largest(total, k)))


def _kept_by(sparsifier, step, d):
    if isinstance(sparsifier, ChunkTopK):
        return -(-d // int(sparsifier.parameters()[0]))
    return kept_count(sparsifier.parameters(step), d)
