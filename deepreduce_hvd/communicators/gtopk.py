"""GTopK: keep only the largest elements of every partial sum."""

from collections.abc import Generator
from typing import Any

from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator, expect_choice
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.doubling import butterfly, tree
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.communicators.sums import BucketSum
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numpy_backend import keep_largest_numpy
from deepreduce_hvd.stages.base import Memory, is_built_in


def keep_largest(total, k):
    """Split ``total`` into its k largest elements and the rest.

    Elements are ordered by magnitude; of equal ones, the smaller index comes first.

    Returns:
        A tuple of two SparseSum objects, both with ascending indices.
    """
    if total.indices.size <= k:
        return total, SparseSum()
    kept, kept_values, rest, rest_values = keep_largest_numpy(total.indices, total.values, k)
    return SparseSum(kept, kept_values), SparseSum(rest, rest_values)


class GTopK(Communicator):
    """Communicator for global top-k: every partial sum keeps only its k largest elements.

    k is the number of elements that the sparsifier selects on one rank. The bytes grow only with
    log2 P, and all ranks receive about k elements instead of up to P k. Source: gTop-k (Shi et al.
    2019).

    The published algorithm puts elements back on every rank and can lose an element that one merge
    drops and another one keeps. Here, only the rank that drops a part of a partial sum adds this
    part to its memory, so nothing is lost. With :class:`MomentumCorrection` the part goes back to
    the residual. The velocities of its elements stay 0, on all ranks that sent them.

    Args:
        form: "butterfly" exchanges partial sums between pairs in ceil(log2 P) rounds, and one or
            two more (docs/communicators.md). "tree" sums up to rank 0 and broadcasts the result.

    Raises:
        InvalidArgumentError: ``form`` is not one of these.
    """

    def __init__(self, form: str = "butterfly") -> None:
        self.form = expect_choice("GTopK form", form, ("butterfly", "tree"))

    def check(self, codec: Codec, memory: Memory) -> None:
        if codec.sparsifier.most_selected(1) is None:
            raise InvalidArgumentError(
                "GTopK: expected a sparsifier with a fixed k such as TopK, ChunkTopK or RandomK,"
                f" got {codec.sparsifier!r}"
            )

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        k = _most_selected(bucket)

        def trim(total):
            sparsifier = bucket.codec.sparsifier
            if not is_built_in(sparsifier) and (now := _most_selected(bucket)) != k:
                raise InvalidArgumentError(
                    f"{type(sparsifier).__name__}.most_selected: expected a number that depends on"
                    " d and step only, so that all ranks keep as many elements, got"
                    f" {k} before select and {now} after it"
                )
            return keep_largest(total, k)

        form = {"butterfly": butterfly, "tree": tree}[self.form]
        return (yield from form(bucket, channel, trim))


def _most_selected(bucket):
    """Return how many elements the sparsifier selects at most from all members of a bucket."""
    sparsifier = bucket.codec.sparsifier
    return sum(sparsifier.most_selected(member.d, bucket.step) for member in bucket.members)
