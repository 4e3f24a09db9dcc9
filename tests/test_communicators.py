"""Test communicators in the simulator: equal to oracles, bit-identical replicas, no loss."""

import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient
from communicator_oracles import Oracle
from sampling import parametrize_product
from simulated_ranks import (
    LOSSY,
    RAW,
    SCHEMES,
    assert_mass_balance,
    dense_of,
    gradients_of,
    jobs_of,
    kept_of,
    run,
    same_bits,
    sparsifier_of,
)

import deepreduce_hvd as dr
from deepreduce_hvd.communicators import base, cltk
from deepreduce_hvd.communicators.gtopk import keep_largest
from deepreduce_hvd.communicators.simulator import Simulator
from deepreduce_hvd.communicators.sparse_sum import SparseSum

SIZES = [*range(1, 18), 64, 100]


@parametrize_product(
    scheme=[name for name in SCHEMES if name != "allgather"],
    size=SIZES,
    stages=[RAW, LOSSY],
    slow={"size": [100]},
)
def test_it_equals_its_oracle(scheme, size, stages):
    codec = dr.Codec(sparsifier_of(scheme), *stages)
    gradients = gradients_of(size, 500)
    oracle = Oracle(scheme, codec, gradients, step=2)
    totals, buckets = run(scheme, codec, gradients, step=2)
    expected = oracle.total()
    for total in totals:
        same_bits(total, totals[0])
    same_bits(totals[0], expected)
    for rank, bucket in enumerate(buckets):
        same_bits(kept_of(bucket) + np.float32(0), oracle.residuals[rank] + np.float32(0))


@pytest.mark.parametrize("size", SIZES)
def test_allgather_sums_in_rank_order_what_encode_makes(size):
    codec = dr.Codec(dr.TopK(0.1), dr.Rice(), dr.QSGD(bits=4))
    gradients = gradients_of(size, 500)
    totals, buckets = run("allgather", codec, gradients, step=2)
    expected = np.zeros(500, dtype=np.float32)
    for rank, whole in enumerate(gradients):
        residual = np.zeros(500, dtype=np.float32)
        expected += dr.decode(codec.encode(whole, residual, step=2, seed=3, tensor=77, rank=rank))
        same_bits(kept_of(buckets[rank]), residual)
    for total in totals:
        same_bits(total, expected)


@parametrize_product(
    scheme=SCHEMES,
    size=[2, 3, 6],
    value=["raw_value", "qsgd_4", "fit_poly", "quantile"],
    index=["rice", "bloom_p0", "bloom_p2", "bloom_naive", "bitmap"],
)
def test_nothing_is_lost_over_steps(scheme, size, value, index):
    codec = dr.Codec(sparsifier_of(scheme, 0.05), INDEX[index], VALUE[value])
    gradients = gradients_of(size, 800)
    residuals = [np.float32(0.3) * gradient(800, 50 + rank) for rank in range(size)]
    for step in range(3):
        totals, buckets = run(
            scheme, codec, gradients, residuals=residuals, step=step, shapes=[300, 0, 1, 499]
        )
        for total in totals:
            same_bits(total, totals[0])
        assert np.abs(totals[0]).sum() > 0
        assert_mass_balance(gradients, residuals, totals[0], buckets, terms=12 * size)
        residuals = [kept_of(bucket) for bucket in buckets]


class _FlushingRanks(dr.Communicator):
    """Communicator whose steps run, on some ranks, on a thread that flushes denormal numbers."""

    def __init__(self, inner, ranks, flush):
        self.inner = inner
        self.ranks = ranks
        self.flush = flush

    def exchange(self, bucket, channel):
        steps, received = self.inner.exchange(bucket, channel), None
        while True:
            self.flush(channel.rank in self.ranks)
            try:
                handle = steps.send(received)
            except StopIteration as end:
                return end.value
            finally:
                self.flush(False)
            received = yield handle


@parametrize_product(scheme=SCHEMES, value=["raw_value", "qsgd_4", "fit_poly", "lloyd_max_4"])
def test_threads_that_flush_denormal_numbers_change_nothing(scheme, value):
    flush = pytest.importorskip("torch").set_flush_denormal
    if not flush(False):
        pytest.skip("this processor cannot flush denormal numbers")
    random = np.random.default_rng(sorted(SCHEMES).index(scheme))
    for _ in range(10):
        size, d = int(random.integers(2, 7)), int(random.integers(20, 400))
        scales = random.choice(np.array([0, 1e-44, 1e-39, 1, 1e3], dtype=np.float32), (size, d))
        gradients = list(scales * random.choice(np.array([-1, 1, 3], dtype=np.float32), (size, d)))
        codec = dr.Codec(sparsifier_of(scheme, 0.5), dr.Rice(), VALUE[value])
        runs = []
        for ranks in (), set(random.choice(size, int(random.integers(1, size))).tolist()):
            buckets = jobs_of(codec, dr.Residual(), gradients)
            outcomes = Simulator(size).run(_FlushingRanks(SCHEMES[scheme], ranks, flush), buckets)
            states = [kept_of(bucket) for bucket in buckets]
            sums = []
            for rank, outcome in enumerate(outcomes):
                flush(rank in ranks)
                try:
                    sums += [dense_of(outcome, buckets), *outcome.sparse(0, 0.75)]
                finally:
                    flush(False)
            runs.append([array.tobytes() for array in states + sums])
        assert runs[0] == runs[1]


@pytest.mark.parametrize("scheme", ["gtopk", "gtopk_tree"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_velocities_of_elements_that_come_back_stay_zero(scheme, size):
    codec, gradients = dr.Codec(dr.TopK(0.1)), gradients_of(size, 200)
    _, buckets = run(scheme, codec, gradients, memory=dr.MomentumCorrection(0.5))
    for bucket, whole in zip(buckets, gradients):
        (member,) = bucket.members
        sent = dr.TopK(0.1).select(whole, 0)
        assert not member.state[1][sent].any()
        rest = np.setdiff1d(np.arange(200), sent)
        same_bits(member.state[1][rest], whole[rest])
    if size > 1:  # some of what was sent has come back
        assert any(
            bucket.members[0].state[0][dr.TopK(0.1).select(whole, 0)].any()
            for bucket, whole in zip(buckets, gradients)
        )


#: schemes that take more than a second with 1024 ranks use 200 ranks in the default run
QUICK = [name for name in SCHEMES if name in ("cltk", "shared_random_k")]
#: SplitAllgather is tested on 200 ranks: on 1024 it takes a minute
NEVER_LARGE = ("split", "split_dense_4", "split_never_dense")


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        *((1024, name) for name in QUICK),
        *((200, name) for name in SCHEMES if name not in QUICK),
        *(
            pytest.param(1024, name, marks=pytest.mark.slow)
            for name in SCHEMES
            if name not in QUICK and name not in NEVER_LARGE
        ),
    ],
)
def test_a_thousand_ranks(scheme, size):
    gradients = gradients_of(size, 300)
    totals, buckets = run(
        scheme, dr.Codec(sparsifier_of(scheme, 0.02), dr.Rice(), dr.RawValue()), gradients
    )
    for total in totals[1:]:
        same_bits(total, totals[0])
    assert_mass_balance(gradients, None, totals[0], buckets, terms=1100)


@parametrize_product(
    scheme=SCHEMES, memory=[dr.NoMemory(), dr.LowPass(0.3), dr.MomentumCorrection(0.5)]
)
def test_other_memories_and_chunk_selection(scheme, memory):
    sparsifier = sparsifier_of(scheme) if scheme == "shared_random_k" else dr.ChunkTopK(chunk=10)
    codec = dr.Codec(sparsifier, dr.Rice(), dr.RawValue())
    gradients = gradients_of(5, 200)
    totals, buckets = run(scheme, codec, gradients, memory=memory)
    for total in totals:
        same_bits(total, totals[0])
    if scheme == "cltk" and memory == dr.LowPass(0.3):
        # ScaleCom, algorithm 1: (1 - beta) m + beta (p - what was sent), m = 0 here
        sent = np.flatnonzero(totals[0])
        for bucket, whole in zip(buckets, gradients):
            expected = np.float32(0.3) * whole
            expected[sent] = 0
            np.testing.assert_allclose(kept_of(bucket), expected, atol=1e-6)


DEGENERATE = {
    "empty": np.zeros(0, dtype=np.float32),
    "one_element": np.ones(1, dtype=np.float32),
    "fewer_elements_than_ranks": np.array([1, -2, 3], dtype=np.float32),
    "all_zero": np.zeros(100, dtype=np.float32),
    "ties": np.where(np.arange(100) % 3, np.float32(-1), np.float32(1)),
    "denormal": gradient(100) * np.float32(1e-41),
}


@parametrize_product(scheme=SCHEMES, size=[1, 2, 3, 7, 8], case=DEGENERATE)
def test_degenerate_inputs(scheme, size, case):
    gradients = [np.roll(DEGENERATE[case], rank) for rank in range(size)]
    totals, buckets = run(
        scheme, dr.Codec(sparsifier_of(scheme), dr.Rice(), dr.RawValue()), gradients
    )
    for total in totals:
        same_bits(total, totals[0])
    if gradients[0].size:
        assert_mass_balance(gradients, None, totals[0], buckets, terms=4 * size)


def test_ties_break_by_magnitude_then_index():
    total = SparseSum(
        np.array([2, 5, 7, 9], dtype=np.uint32), np.array([1, -1, 1, 2], dtype=np.float32)
    )
    kept, dropped = keep_largest(total, 2)
    assert kept.indices.tolist() == [2, 9] and dropped.indices.tolist() == [5, 7]


def test_gtopk_and_cltk_do_not_fill_in():
    codec = dr.Codec(dr.TopK(0.05), dr.Rice(), dr.RawValue())
    gradients = gradients_of(16, 1000)
    counts = {
        scheme: np.count_nonzero(run(scheme, codec, gradients)[0][0])
        for scheme in ("gtopk", "cltk", "recursive_doubling")
    }
    assert counts["gtopk"] == counts["cltk"] == 50
    assert counts["recursive_doubling"] > 100


@parametrize_product(
    index=INDEX,
    sparsifier=[dr.TopK(0.5), dr.ChunkTopK(0.02), dr.RandomK(0.3)],
    memory=[dr.Residual(), dr.LowPass(0.3), dr.MomentumCorrection(0.5)],
)
def test_cltk_selects_once_or_twice_with_the_same_result(monkeypatch, index, sparsifier, memory):
    """If its message is lossless, the leader needs no second selection."""
    codec, random = dr.Codec(sparsifier, INDEX[index], dr.RawValue()), np.random.default_rng(1)
    gradients = [random.standard_normal(1500).astype(np.float32) for _ in range(3)]
    gradients[1][random.random(1500) < 0.7] = 0

    def results():
        totals, buckets = run("cltk", codec, gradients, memory=memory, step=1, shapes=[1400, 100])
        states = [part for bucket in buckets for member in bucket.members for part in member.state]
        return [*totals, *states]

    once = results()
    monkeypatch.setattr(cltk, "_decodes_to_itself", lambda bucket: False)
    for one, other in zip(once, results(), strict=True):
        same_bits(one, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.SplitAllgather(dense=3), "expected one of 'auto', None, 2, 4, 8, got 3"),
        (lambda: dr.SplitAllgather(dense=True), "got True"),
        (lambda: dr.GTopK(form="ring"), "expected one of 'butterfly', 'tree', got 'ring'"),
        (lambda: dr.GTopK().check(dr.Codec(dr.Threshold(0.1)), dr.Residual()), "fixed k"),
        (
            lambda: dr.CLTK().check(dr.Codec(dr.Threshold(0)), dr.NoMemory()),
            "expected a memory with Threshold",
        ),
        (
            lambda: dr.CLTK().check(dr.Codec(dr.TopK(1.0)), dr.NoMemory()),
            "expected a memory with TopK",
        ),
        (
            lambda: dr.CLTK().check(dr.Codec(dr.ChunkTopK(chunk=1)), dr.NoMemory()),
            "expected a memory with ChunkTopK",
        ),
        (lambda: dr.SharedRandomK().check(dr.Codec(dr.TopK(0.1)), dr.Residual()), "RandomK"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("sparsifier", [dr.TopK(0.99), dr.ChunkTopK(0.5), dr.NoneSparsifier()])
def test_cltk_needs_no_memory_for_a_part_or_for_zeros(sparsifier):
    dr.CLTK().check(dr.Codec(sparsifier), dr.NoMemory())
    dr.CLTK().check(dr.Codec(dr.TopK(1.0)), dr.Residual())


@pytest.mark.parametrize("value", [dr.LloydMax(bits=1), dr.LloydMax(bits=2)], ids=repr)
def test_dense_slices_keep_their_zeros(value):
    """With one bit per value, the zeros of a dense slice would become plus or minus the mean."""
    size, d = 4, 4000
    gradients = [np.zeros(d, dtype=np.float32) for _ in range(size)]
    for rank, own in enumerate(gradients):  # a third of each slice, with equal magnitudes
        own[rank::12] = 1 - 2 * (np.arange(own[rank::12].size) % 2)
    codec = dr.Codec(dr.TopK(0.5), index=dr.Rice(), value=value)
    total = run("split", codec, gradients)[0][0]
    expected = np.sum(gradients, axis=0)
    np.testing.assert_array_equal(total[expected == 0], 0)
    np.testing.assert_array_equal(total, expected)


def test_the_pauses_of_a_long_wait_are_longer(monkeypatch):
    """A rank that waits leaves the processor to the ranks that it waits for."""
    now, begun, waits = 1000.0, 1000.0, []
    monkeypatch.setattr(base.time, "perf_counter", lambda: now)
    monkeypatch.setattr(base.time, "sleep", waits.append)
    while now < begun + 10:
        base.Transport().pause(begun)
        now += waits[-1]
        assert waits[-1] <= max(5e-5, 0.11 * (now - begun))
    assert sorted(waits) == waits
    assert (waits[0], waits[-1]) == (5e-5, 1e-3)
