"""Test Hierarchical: sums within hosts, then another communicator between their first ranks."""

import numpy as np
import pytest
from sampling import parametrize_product
from simulated_ranks import (
    LOSSY,
    SCHEMES,
    assert_mass_balance,
    dense_of,
    gradients_of,
    jobs_of,
    kept_of,
    same_bits,
    sparsifier_of,
)

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.bucket import BucketMember
from deepreduce_hvd.communicators.simulator import Simulator


@parametrize_product(
    scheme=[name for name in SCHEMES if name != "split_dense_4"],
    per_host=[1, 2, 4],
    hosts=[1, 2, 3, 5],
)
def test_hierarchical_is_the_scheme_on_the_sums_of_hosts(scheme, per_host, hosts):
    codec = dr.Codec(sparsifier_of(scheme), *LOSSY)
    gradients = gradients_of(hosts * per_host, 300)
    sums = []
    for host in range(hosts):
        sums.append(np.add.accumulate(gradients[host * per_host : (host + 1) * per_host])[-1])
    expected_jobs = jobs_of(codec, dr.Residual(), sums, step=1)
    for host, bucket in enumerate(expected_jobs):
        bucket.rank = host * per_host  # the rank determines the key of the rounding
    expected = Simulator(hosts).run(SCHEMES[scheme], expected_jobs)
    buckets = jobs_of(codec, dr.Residual(), gradients, step=1)
    outcomes = Simulator(len(buckets)).run(dr.Hierarchical(SCHEMES[scheme], per_host), buckets)
    for outcome in outcomes:
        same_bits(dense_of(outcome, buckets), dense_of(expected[0], expected_jobs) + np.float32(0))
    for rank, bucket in enumerate(buckets):
        kept = (
            np.zeros(300, dtype=np.float32)
            if rank % per_host
            else kept_of(expected_jobs[rank // per_host])
        )
        same_bits(kept_of(bucket), kept)
    assert_mass_balance(
        gradients, None, dense_of(outcomes[0], buckets), buckets, terms=12 * len(buckets)
    )


@parametrize_product(scheme=SCHEMES, who=[0, 1, 5])
def test_hierarchical_failures_and_nan(scheme, who):
    codec = dr.Codec(sparsifier_of(scheme), *LOSSY)
    buckets = jobs_of(codec, dr.Residual(), gradients_of(6, 200), shapes=[80, 120])
    buckets[who].members[1] = BucketMember.failed("tensor1", 120, OSError("no memory left"))
    for outcome in Simulator(6).run(dr.Hierarchical(SCHEMES[scheme], 2), buckets):
        assert isinstance(outcome, dr.PeerFailedError)
        assert f"rank {who}: OSError: no memory left" in str(outcome)
    gradients = gradients_of(6, 200)
    gradients[who][150] = np.inf
    buckets = jobs_of(codec, dr.Residual(), gradients, shapes=[80, 120])
    for outcome in Simulator(6).run(dr.Hierarchical(SCHEMES[scheme], 2), buckets):
        assert np.isnan(dense_of(outcome, buckets)).all()


class OutOfMemory(dr.Allgather):
    """A communicator that fails between hosts, with an error of another package."""

    def exchange(self, bucket, channel):
        yield from super().exchange(bucket, channel)
        if bucket.rank == 2:
            raise MemoryError("none left")


def test_what_a_hosts_first_rank_meets_is_heard_on_its_host():
    codec = dr.Codec(dr.TopK(0.1), *LOSSY)
    buckets = jobs_of(codec, dr.Residual(), gradients_of(4, 200))
    outcomes = Simulator(4).run(dr.Hierarchical(OutOfMemory(), 2), buckets)
    for rank in (2, 3):
        assert isinstance(
            outcomes[rank], dr.PeerFailedError
        ) and "rank 2: MemoryError: none left" in str(outcomes[rank])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "got 3"),
        ((dr.Hierarchical(dr.Allgather()),), "a communicator other than Hierarchical"),
        ((dr.Allgather(), 0), "got 0"),
    ],
)
def test_hierarchical_settings(arguments, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.Hierarchical(*arguments)
