"""Shared by tests of communicators: buckets of simulated ranks, dense sums, and mass balance."""

import numpy as np
from codecs_table import gradient

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.simulator import Simulator

RAW = (dr.RawIndex(), dr.RawValue())
LOSSY = (dr.Rice(), dr.QSGD(bits=4))
SCHEMES = {
    "allgather": dr.Allgather(),
    "split": dr.SplitAllgather(),
    "split_never_dense": dr.SplitAllgather(dense=None),
    "split_dense_4": dr.SplitAllgather(dense=4),
    "recursive_doubling": dr.RecursiveDoubling(),
    "gtopk": dr.GTopK(),
    "gtopk_tree": dr.GTopK(form="tree"),
    "cltk": dr.CLTK(),
    "shared_random_k": dr.SharedRandomK(),
}


def sparsifier_of(scheme, ratio=0.1):
    return dr.RandomK(ratio) if scheme == "shared_random_k" else dr.TopK(ratio)


def jobs_of(codec, memory, gradients, residuals=None, step=0, seed=3, shapes=None):
    """Return one bucket per rank; ``shapes`` divides the gradient into members."""
    buckets = []
    for rank, whole in enumerate(gradients):
        state = (
            ()
            if not memory.state
            else tuple(np.zeros(whole.size, dtype=np.float32) for _ in memory.state)
        )
        if residuals is not None and state:
            state[0][...] = residuals[rank]
        members, start = [], 0
        for number, d in enumerate(shapes or [whole.size]):
            piece = slice(start, start + d)
            members.append(
                BucketMember(
                    f"tensor{number}",
                    whole[piece],
                    tuple(part[piece] for part in state),
                    key=77 + number,
                )
            )
            start += d
        buckets.append(Bucket(codec, memory, members, seed=seed, step=step, rank=rank))
    return buckets


def gradients_of(size, d):
    return [gradient(d, 100 + 3 * rank) + np.float32(0.5) * gradient(d, 99) for rank in range(size)]


def dense_of(total, buckets):
    """Return the sum as one (d,) array."""
    out = np.zeros(buckets[0].d, dtype=np.float32)
    for number in range(len(buckets[0].members)):
        start, end = buckets[0].offsets[number : number + 2]
        total.add_to(number, out[start:end], 1.0)
    return out


def kept_of(bucket):
    return np.concatenate([member.state[0] for member in bucket.members])


def run(scheme, codec, gradients, memory=None, **options):
    memory = dr.Residual() if memory is None else memory
    buckets = jobs_of(codec, memory, gradients, **options)
    SCHEMES[scheme].check(codec, memory)
    outcomes = Simulator(len(buckets)).run(SCHEMES[scheme], buckets)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [dense_of(outcome, buckets) for outcome in outcomes], buckets


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def assert_mass_balance(gradients, residuals, total, buckets, terms):
    """Check that the inputs equal the result of every rank plus the memories.

    Each element may differ by ``terms`` roundings to float32.
    """
    came_in = np.sum([whole.astype(np.float64) for whole in gradients], axis=0)
    largest = np.sum([np.abs(whole.astype(np.float64)) for whole in gradients], axis=0)
    if residuals is not None:
        came_in += np.sum([part.astype(np.float64) for part in residuals], axis=0)
        largest += np.sum([np.abs(part.astype(np.float64)) for part in residuals], axis=0)
    kept = np.sum([kept_of(bucket).astype(np.float64) for bucket in buckets], axis=0)
    error = np.abs(total.astype(np.float64) + kept - came_in)
    assert (error <= terms * 2.0**-24 * largest.max()).all(), error.max() / largest.max() * 2**24
