"""Test the communicator "auto": its costs, measurements, and equal choices on all ranks."""

import numpy as np
import pytest
from codecs_table import gradient
from simulated_ranks import dense_of, gradients_of, jobs_of, same_bits
from threaded_ranks import Group, ThreadedTransport, on_all

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.auto import _Facts, _Links, costs, message_bytes
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.given_vectors import GivenVector, GivenVectorSum
from deepreduce_hvd.communicators.simulator import SimulatedTransport, Simulator


def test_costs_follow_the_formulas():
    few, many = (costs(1000, 100_000, size, 1e-3, 1e-9, 32) for size in (2, 1024))
    assert min(few, key=few.get) == "Allgather"
    assert many["Allgather"] > many["SplitAllgather"]
    # bytes dominate: one rank receives a slice, not every rank
    slow = costs(100_000, 10_000_000, 64, 1e-3, 1e-7, 32)
    assert min(slow, key=slow.get) == "SplitAllgather"
    # all ranks send the same elements: no fill-in
    alike = costs(1000, 1_000_000, 64, 1e-5, 1e-7, 32, union=1000)
    assert (
        alike["RecursiveDoubling"] < costs(1000, 1_000_000, 64, 1e-5, 1e-7, 32)["RecursiveDoubling"]
    )
    assert costs(100, 1000, 8, 1.0, 0.0, 32) == {
        "Allgather": 1,
        "SplitAllgather": 2,
        "RecursiveDoubling": 4,
    }
    assert costs(100, 1000, 9, 1.0, 0.0, 32)["RecursiveDoubling"] == 6


def test_message_bytes_are_close_to_real_ones():
    d = 100_000
    for k in (100, 1000, 10_000):
        payload = dr.Codec(dr.TopK(k=k), dr.Rice(), dr.RawValue()).encode(gradient(d))
        assert abs(payload.size / message_bytes(k, d, 32) - 1) < 0.03


@pytest.mark.parametrize("sparsifier", [dr.TopK(0.1), dr.Threshold(0.5)], ids=repr)
def test_auto_chooses_alike_on_all_ranks_and_says_why(sparsifier):
    codec = dr.Codec(sparsifier, dr.Rice(), dr.RawValue())
    communicators = [dr.Auto() for _ in range(8)]
    for one in communicators:
        one._facts[tuple(range(8))] = _Facts(_Links(1e-6, 1e-6))
    chosen = []
    for step in range(3):
        buckets = jobs_of(codec, dr.Residual(), gradients_of(8, 2000), step=step)

        class Each(dr.Communicator):
            def exchange(self, bucket, channel):
                return (yield from communicators[bucket.rank].exchange(bucket, channel))

        totals = [dense_of(outcome, buckets) for outcome in Simulator(8).run(Each(), buckets)]
        for total in totals:
            same_bits(total, totals[0])
        schemes = {bucket.scheme for bucket in buckets}
        assert len(schemes) == 1
        chosen.append(schemes.pop())
    if isinstance(sparsifier, dr.Threshold):
        assert chosen[0].startswith("Allgather: k is not known")
    assert (
        chosen[1].startswith("SplitAllgather: ") and "union" in chosen[1] and "P = 8" in chosen[1]
    )


def test_auto_measures_once_and_takes_what_rank_0_says():
    class Recording(SimulatedTransport):
        calls = 0

        def wait(self, handle):
            Recording.calls += 1
            if handle.kind == "broadcast":
                return np.array([2e-3, 3e-9]).view(np.uint8)
            return handle.data

    auto = dr.Auto()
    for _ in range(2):
        auto.prepare(Recording(range(4), 1))
    facts = auto._facts[0, 1, 2, 3]
    assert facts.links == (2e-3, 3e-9)
    assert Recording.calls == 15


@pytest.mark.parametrize("seed", range(4))
def test_auto_in_process_sets_whose_ranks_are_replaced(seed):
    """Each rank has one Auto for all sets, also of equal size; a new rank has another one."""
    random = np.random.default_rng(seed)
    autos = [dr.Auto() for _ in range(5)]
    for step in range(12):
        ranks = sorted(random.choice(5, int(random.choice([2, 2, 3])), replace=False).tolist())
        if random.integers(3) == 0:
            autos[random.choice(ranks)] = dr.Auto()
        d = int(random.choice([50, 5000]))
        given = [np.sort(random.choice(d, 30, replace=False)).astype(np.uint32) for _ in ranks]
        group = Group(len(ranks))

        def sum_of(number, step=step, ranks=ranks, d=d, given=given, group=group):
            values = np.full(30, ranks[number] + 1, dtype=np.float32)
            vector = GivenVector("v", given[number], values, d, number, step)
            total = GivenVectorSum(autos[ranks[number]], dr.Rice(), dr.RawValue(), {})
            transport = ThreadedTransport(group, number, ranks)
            exchange = Exchange(total, vector, transport, f"exchange.{step}")
            return (*exchange.finish().sparse(0, 1.0), vector.scheme)

        outcomes = on_all(
            group, [lambda number=number: sum_of(number) for number in range(len(ranks))]
        )
        expected = np.zeros(d)
        for rank, indices in zip(ranks, given):
            expected[indices] += rank + 1
        for outcome in outcomes:
            assert not isinstance(outcome, Exception), (step, ranks, outcomes)
            np.testing.assert_array_equal(outcome[0], np.flatnonzero(expected))
            np.testing.assert_array_equal(outcome[1], expected[outcome[0]])
            assert outcome[2] == outcomes[0][2]


def test_compressors_that_share_an_auto_do_not_share_what_it_knows():
    """What is known of one's bucket would change the other's choice at any moment."""
    size, shared = 4, dr.Auto()
    shared._facts[tuple(range(size))] = _Facts(_Links(1e-6, 1e-6))
    alone = dr.Auto()
    alone._facts[tuple(range(size))] = _Facts(_Links(1e-6, 1e-6))

    def schemes(auto, sparsifier, name):
        codec = dr.Codec(sparsifier, dr.Rice(), dr.RawValue())
        buckets = jobs_of(codec, dr.Residual(), gradients_of(size, 2000), step=1)
        Simulator(size).run(auto, buckets, name=name)
        return {bucket.scheme for bucket in buckets}

    schemes(shared, dr.TopK(0.01), "deepreduce.0.weight")
    after = schemes(shared, dr.TopK(0.3), "deepreduce.1.weight")
    assert after == schemes(alone, dr.TopK(0.3), "deepreduce.1.weight")
