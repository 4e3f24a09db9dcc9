"""GTopK: of every partial sum only the largest elements go on."""

import numpy as np

from deepreduce_hvd.communicators.base import Communicator, expect_choice
from deepreduce_hvd.communicators.doubling import butterfly, tree
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.errors import InvalidArgumentError


def keep_largest(total, k):
    """(the k elements of ``total`` largest by (|value|, smaller index first), the rest), both
    ascending.
    """
    if total.indices.size <= k:
        return total, SparseSum()
    kept = np.zeros(total.indices.size, dtype=bool)
    kept[np.argsort(-np.abs(total.values), kind="stable")[:k]] = True
    return SparseSum(total.indices[kept], total.values[kept]), SparseSum(
        total.indices[~kept], total.values[~kept]
    )


class GTopK(Communicator):
    """Global top-k (Shi et al. 2019): of every partial sum only the k largest elements go on, k
    being what the sparsifier keeps of a rank.

    Bytes grow with log2 P only, and all ranks get about k elements instead of up to P k. Unlike the
    published put-back, which loses an element that one merge drops and another lets through,
    whoever drops a partial sum keeps it in its own memory and nobody else does: nothing is lost.
    ``form``: "butterfly", ceil(log2 P) exchanges between pairs, or "tree", up to rank 0 and back by
    a broadcast.
    """

    def __init__(self, form: str = "butterfly") -> None:
        self.form = expect_choice("GTopK form", form, ("butterfly", "tree"))

    def check(self, codec, memory):
        if codec.sparsifier.most_selected(1) is None:
            raise InvalidArgumentError(
                f"GTopK: expected a sparsifier with a fixed k such as TopK, ChunkTopK or RandomK, got {codec.sparsifier!r}"
            )

    def exchange(self, bucket, channel):
        k = sum(
            bucket.codec.sparsifier.most_selected(member.gradient.size, bucket.step)
            for member in bucket.members
        )
        form = {"butterfly": butterfly, "tree": tree}[self.form]
        return (yield from form(bucket, channel, lambda total: keep_largest(total, k)))
