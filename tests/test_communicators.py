"""Communicators in the simulator: equal to their oracles, replicas bit-identical, nothing lost, failures heard by all."""

import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient

import deepreduce_hvd as dr
from deepreduce_hvd import reference
from deepreduce_hvd.communicators.auto import costs, message_bytes
from deepreduce_hvd.communicators.gtopk import keep_largest
from deepreduce_hvd.communicators.job import Job, Member
from deepreduce_hvd.communicators.partial import Partial
from deepreduce_hvd.communicators.simulator import PeerGone, SimulatedTransport, Simulator

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
SIZES = [*range(1, 18), 64, 100]


def sparsifier_of(scheme, ratio=0.1):
    return dr.RandomK(ratio) if scheme == "shared_random_k" else dr.TopK(ratio)


def jobs_of(codec, memory, gradients, residuals=None, step=0, seed=3, shapes=None):
    """One job a rank; ``shapes`` cuts the gradient into members."""
    jobs = []
    for rank, whole in enumerate(gradients):
        state = () if not memory.state else tuple(np.zeros(whole.size, dtype=np.float32) for _ in memory.state)
        if residuals is not None and state:
            state[0][...] = residuals[rank]
        members, start = [], 0
        for number, d in enumerate(shapes or [whole.size]):
            piece = slice(start, start + d)
            members.append(Member(f"tensor{number}", whole[piece], tuple(part[piece] for part in state), key=77 + number))
            start += d
        jobs.append(Job(codec, memory, members, seed=seed, step=step, rank=rank))
    return jobs


def gradients_of(size, d):
    return [gradient(d, 100 + 3 * rank) + np.float32(0.5) * gradient(d, 99) for rank in range(size)]


def dense_of(total, jobs):
    """The sum as one (d,) array."""
    out = np.zeros(jobs[0].d, dtype=np.float32)
    for number in range(len(jobs[0].members)):
        start, end = jobs[0].offsets[number : number + 2]
        total.add_to(number, out[start:end], 1.0)
    return out


def kept_of(job):
    return np.concatenate([member.state[0] for member in job.members])


def run(scheme, codec, gradients, memory=None, **options):
    memory = dr.Residual() if memory is None else memory
    jobs = jobs_of(codec, memory, gradients, **options)
    SCHEMES[scheme].check(codec, memory)
    outcomes = Simulator(len(jobs)).run(SCHEMES[scheme], jobs)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [dense_of(outcome, jobs) for outcome in outcomes], jobs


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def assert_mass_balance(gradients, residuals, total, jobs, terms):
    """Sum of what came in = what every rank got + what memories keep, but for ``terms`` roundings to float32 of each element."""
    came_in = np.sum([whole.astype(np.float64) for whole in gradients], axis=0)
    largest = np.sum([np.abs(whole.astype(np.float64)) for whole in gradients], axis=0)
    if residuals is not None:
        came_in += np.sum([part.astype(np.float64) for part in residuals], axis=0)
        largest += np.sum([np.abs(part.astype(np.float64)) for part in residuals], axis=0)
    kept = np.sum([kept_of(job).astype(np.float64) for job in jobs], axis=0)
    error = np.abs(total.astype(np.float64) + kept - came_in)
    assert (error <= terms * 2.0**-24 * largest.max()).all(), error.max() / largest.max() * 2**24


# --- oracles: one process that knows all ranks ---


class Oracle:
    """The state of all ranks, dense, and the coding that NumPy does."""

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
        """What a partial sum (indices, values) decodes to; what is lost goes to rank ``owner``."""
        indices, values = part
        stages = stages or (self.codec.index, self.codec.value)
        payload, lacks, (added, added_values) = reference.encode_sparse(
            stages, indices, values, self.d if d is None else d, 0, self.seed, self.step, 77 | stage << 32, group
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
        """The replay of the tree: blocks of ranks are merged two and two; the lowest rank of a block answers for it."""
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
            for owner, (start, end) in enumerate(zip(bounds, bounds[1:])):
                part = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.float32)
                for rank, (indices, values) in enumerate(own):
                    here = (indices >= start) & (indices < end)
                    cut = indices[here] - np.uint32(start), values[here]
                    if cut[0].size:
                        cut = self.coded(cut, owner, rank, rank, start, end - start, RAW if owner == rank else None)
                    part = self.added(part, cut, end - start)
                stages, d = None, end - start
                dense = dr.QSGD(bits=4, bucket=1024) if self.scheme == "split_dense_4" else self.codec.value
                if self.scheme != "split_never_dense" and 0 < part[0].size < d:
                    index_bits = np.log2(d / part[0].size) + 1 / np.log(2)
                    if part[0].size * (index_bits + self.codec.value.bits_a_value()) >= d * dense.bits_a_value():
                        values = np.zeros(d, dtype=np.float32)
                        values[part[0]] = part[1]
                        part, stages = (np.arange(d, dtype=np.uint32), values), (dr.RawIndex(), dense)
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


@pytest.mark.parametrize("stages", [RAW, LOSSY], ids=["raw", "lossy"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "allgather"])
def test_it_equals_its_oracle(scheme, size, stages):
    codec = dr.Codec(sparsifier_of(scheme), *stages)
    gradients = gradients_of(size, 500)
    oracle = Oracle(scheme, codec, gradients, step=2)
    totals, jobs = run(scheme, codec, gradients, step=2)
    expected = oracle.total()
    for total in totals:
        same_bits(total, totals[0])
    same_bits(totals[0], expected)
    for rank, job in enumerate(jobs):
        same_bits(kept_of(job) + np.float32(0), oracle.residuals[rank] + np.float32(0))


@pytest.mark.parametrize("size", SIZES)
def test_allgather_sums_in_rank_order_what_encode_makes(size):
    codec = dr.Codec(dr.TopK(0.1), dr.Rice(), dr.QSGD(bits=4))
    gradients = gradients_of(size, 500)
    totals, jobs = run("allgather", codec, gradients, step=2)
    expected = np.zeros(500, dtype=np.float32)
    for rank, whole in enumerate(gradients):
        residual = np.zeros(500, dtype=np.float32)
        expected += dr.decode(codec.encode(whole, residual, step=2, seed=3, tensor=77, rank=rank))
        same_bits(kept_of(jobs[rank]), residual)
    for total in totals:
        same_bits(total, expected)


@pytest.mark.parametrize("index", ["rice", "bloom_p0", "bloom_p2", "bloom_naive", "bitmap"])
@pytest.mark.parametrize("value", ["raw_value", "qsgd_4", "fit_poly", "quantile"])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_lost_over_steps(scheme, size, value, index):
    codec = dr.Codec(sparsifier_of(scheme, 0.05), INDEX[index], VALUE[value])
    gradients = gradients_of(size, 800)
    residuals = [np.float32(0.3) * gradient(800, 50 + rank) for rank in range(size)]
    for step in range(3):
        totals, jobs = run(scheme, codec, gradients, residuals=residuals, step=step, shapes=[300, 0, 1, 499])
        for total in totals:
            same_bits(total, totals[0])
        assert np.abs(totals[0]).sum() > 0
        assert_mass_balance(gradients, residuals, totals[0], jobs, terms=12 * size)
        residuals = [kept_of(job) for job in jobs]


THOUSANDS = [(1024, name) for name in SCHEMES if not name.startswith("split")] + [(200, name) for name in SCHEMES if name.startswith("split")]


@pytest.mark.parametrize(("size", "scheme"), [*THOUSANDS, pytest.param(1024, "split", marks=pytest.mark.slow)])
def test_a_thousand_ranks(scheme, size):
    gradients = gradients_of(size, 300)
    totals, jobs = run(scheme, dr.Codec(sparsifier_of(scheme, 0.02), dr.Rice(), dr.RawValue()), gradients)
    for total in totals[1:]:
        same_bits(total, totals[0])
    assert_mass_balance(gradients, None, totals[0], jobs, terms=1100)


@pytest.mark.parametrize("memory", [dr.NoMemory(), dr.LowPass(0.3), dr.MomentumCorrection(0.5)], ids=repr)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_memories_and_chunk_selection(scheme, memory):
    sparsifier = sparsifier_of(scheme) if scheme == "shared_random_k" else dr.ChunkTopK(chunk=10)
    codec = dr.Codec(sparsifier, dr.Rice(), dr.RawValue())
    gradients = gradients_of(5, 200)
    totals, jobs = run(scheme, codec, gradients, memory=memory)
    for total in totals:
        same_bits(total, totals[0])
    if scheme == "cltk" and memory == dr.LowPass(0.3):
        # ScaleCom, algorithm 1: (1 - beta) m + beta (p - what was sent), m = 0 here
        sent = np.flatnonzero(totals[0])
        for job, whole in zip(jobs, gradients):
            expected = np.float32(0.3) * whole
            expected[sent] = 0
            np.testing.assert_allclose(kept_of(job), expected, atol=1e-6)


DEGENERATE = {
    "empty": np.zeros(0, dtype=np.float32),
    "one_element": np.ones(1, dtype=np.float32),
    "fewer_elements_than_ranks": np.array([1, -2, 3], dtype=np.float32),
    "all_zero": np.zeros(100, dtype=np.float32),
    "ties": np.where(np.arange(100) % 3, np.float32(-1), np.float32(1)),
    "denormal": gradient(100) * np.float32(1e-41),
}


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_degenerate_inputs(scheme, size, case):
    gradients = [np.roll(DEGENERATE[case], rank) for rank in range(size)]
    totals, jobs = run(scheme, dr.Codec(sparsifier_of(scheme), dr.Rice(), dr.RawValue()), gradients)
    for total in totals:
        same_bits(total, totals[0])
    if gradients[0].size:
        assert_mass_balance(gradients, None, totals[0], jobs, terms=4 * size)


def test_ties_break_by_magnitude_then_index():
    total = Partial(np.array([2, 5, 7, 9], dtype=np.uint32), np.array([1, -1, 1, 2], dtype=np.float32))
    kept, dropped = keep_largest(total, 2)
    assert kept.indices.tolist() == [2, 9] and dropped.indices.tolist() == [5, 7]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("who", [0, 1, 4])
@pytest.mark.parametrize("shapes", [None, [60, 140]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_not_finite_on_one_rank_is_nan_on_all(scheme, who, bad, shapes):
    gradients = gradients_of(5, 200)
    gradients[who][120] = bad
    residuals = [gradient(200, 30 + rank) for rank in range(5)]
    totals, jobs = run(scheme, dr.Codec(sparsifier_of(scheme), *LOSSY), gradients, residuals=residuals, shapes=shapes)
    for total in totals:
        assert np.isnan(total[60:]).all()
    # the rank's own memory is as it was; adding a selected element to what was left of it is exact but for the part selected from the gradient
    kept = kept_of(jobs[who])
    same_bits(kept[60:] if shapes else kept, residuals[who][60:] if shapes else residuals[who])


@pytest.mark.parametrize("who", [[0], [1], [4], [2, 3]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rank_that_fails_makes_all_raise(scheme, who):
    jobs = jobs_of(dr.Codec(sparsifier_of(scheme), *LOSSY), dr.Residual(), gradients_of(5, 200))
    for rank in who:
        jobs[rank].members[0].state = (np.zeros(7, dtype=np.float32),)
    outcomes = Simulator(5).run(SCHEMES[scheme], jobs)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, dr.PeerFailed), (rank, outcome)
        for failed in who:
            assert f"rank {failed}: " in str(outcome)
        assert "tensor0" in str(outcome)
        assert (outcome.__cause__ is not None) == (rank in who)


@pytest.mark.parametrize("scheme", ["split", "recursive_doubling", "gtopk"])
def test_a_corrupt_message_is_named(scheme):
    """A message broken on its way to one rank: the others hear of it in a later round."""

    class Breaking(Simulator):
        def _alltoall(self, group, calls):
            received = super()._alltoall(group, calls)
            if self.rounds == 1:
                part = received[2][3].copy()
                assert part.size
                part[-1] ^= 1
                received[2] = [*received[2][:3], part, *received[2][4:]]
            return received

    jobs = jobs_of(dr.Codec(dr.TopK(0.1), dr.Rice(), dr.RawValue()), dr.Residual(), gradients_of(4, 200))
    outcomes = Breaking(4).run(SCHEMES[scheme], jobs)
    for outcome in outcomes:
        assert isinstance(outcome, dr.PeerFailed), outcome
        assert "rank 2: CorruptPayload" in str(outcome)


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_one_rank_breaks_is_an_error_on_all(scheme, size, who):
    """A rank that sends a payload broken in its last byte, in any round: every rank raises, with the cause and who met it."""
    who = min(who, size - 1)

    class Breaking(Simulator):
        def __init__(self, broken_round):
            super().__init__(size)
            self.broken_round = broken_round
            self.broke = False

        def _broken(self, data):
            if data is None or data.dtype != np.uint8 or not data.size or self.rounds != self.broken_round:
                return data
            self.broke = True
            return np.concatenate([data[:-1], data[-1:] ^ 1])

        def _perform(self, group, calls):
            calls[who].data = [self._broken(part) for part in calls[who].data] if calls[who].kind == "alltoall" else self._broken(calls[who].data)
            return super()._perform(group, calls)

    codec = dr.Codec(sparsifier_of(scheme), dr.Rice(), dr.RawValue())
    broken = 0
    for broken_round in range(10):
        jobs = jobs_of(codec, dr.Residual(), gradients_of(size, 200), step=who)  # which makes it CLTK's leader
        simulator = Breaking(broken_round)
        outcomes = simulator.run(SCHEMES[scheme], jobs)
        broken += simulator.broke
        for rank, outcome in enumerate(outcomes):
            if not simulator.broke:
                assert not isinstance(outcome, Exception)
                continue
            if not isinstance(outcome, Exception):
                with pytest.raises(dr.CorruptPayload) as raised:
                    dense_of(outcome, jobs)
                outcome = raised.value
            assert "payload checksum: expected" in str(outcome) and "rank " in str(outcome), (rank, outcome)
    assert broken >= (scheme != "shared_random_k") and broken <= simulator.rounds


def test_a_rank_that_dies_does_not_leave_the_others_in_silence():
    class Dying(dr.Allgather):
        def exchange(self, job, channel):
            if job.rank == 1:
                raise OSError("gone")
            return (yield from super().exchange(job, channel))

    jobs = jobs_of(dr.Codec(dr.TopK(0.1)), dr.Residual(), gradients_of(3, 50))
    outcomes = Simulator(3).run(Dying(), jobs)
    assert isinstance(outcomes[1], OSError)
    assert isinstance(outcomes[0], PeerGone) and isinstance(outcomes[2], PeerGone)


def test_gtopk_and_cltk_do_not_fill_in():
    codec = dr.Codec(dr.TopK(0.05), dr.Rice(), dr.RawValue())
    gradients = gradients_of(16, 1000)
    counts = {scheme: np.count_nonzero(run(scheme, codec, gradients)[0][0]) for scheme in ("gtopk", "cltk", "recursive_doubling")}
    assert counts["gtopk"] == counts["cltk"] == 50
    assert counts["recursive_doubling"] > 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.SplitAllgather(dense=3), "expected one of 'auto', None, 2, 4, 8, got 3"),
        (lambda: dr.SplitAllgather(dense=True), "got True"),
        (lambda: dr.GTopK(form="ring"), "expected one of 'butterfly', 'tree', got 'ring'"),
        (lambda: dr.GTopK().check(dr.Codec(dr.Threshold(0.1)), dr.Residual()), "fixed k"),
        (lambda: dr.SharedRandomK().check(dr.Codec(dr.TopK(0.1)), dr.Residual()), "RandomK"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(dr.InvalidArgument, match=message):
        make()


# --- auto ---


def test_costs_follow_the_formulas():
    few, many = (costs(1000, 100_000, size, 1e-3, 1e-9, 32) for size in (2, 1024))
    assert min(few, key=few.get) == "Allgather"  # one round instead of two
    assert many["Allgather"] > many["SplitAllgather"]
    slow = costs(100_000, 10_000_000, 64, 1e-3, 1e-7, 32)  # bytes count: slices are received once, not by everyone
    assert min(slow, key=slow.get) == "SplitAllgather"
    alike = costs(1000, 1_000_000, 64, 1e-5, 1e-7, 32, union=1000)  # all ranks send the same elements: no fill-in
    assert alike["RecursiveDoubling"] < costs(1000, 1_000_000, 64, 1e-5, 1e-7, 32)["RecursiveDoubling"]
    assert costs(100, 1000, 8, 1.0, 0.0, 32) == {"Allgather": 1, "SplitAllgather": 2, "RecursiveDoubling": 4}
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
        one._latency, one._seconds_a_byte = 1e-6, 1e-6
    chosen = []
    for step in range(3):
        jobs = jobs_of(codec, dr.Residual(), gradients_of(8, 2000), step=step)

        class Each(dr.Communicator):
            def exchange(self, job, channel):
                return (yield from communicators[job.rank].exchange(job, channel))

        totals = [dense_of(outcome, jobs) for outcome in Simulator(8).run(Each(), jobs)]
        for total in totals:
            same_bits(total, totals[0])
        schemes = {job.scheme for job in jobs}
        assert len(schemes) == 1
        chosen.append(schemes.pop())
    if isinstance(sparsifier, dr.Threshold):
        assert chosen[0].startswith("Allgather: k is not known")
    assert chosen[1].startswith("SplitAllgather: ") and "union" in chosen[1] and "P = 8" in chosen[1]


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
    assert (auto._latency, auto._seconds_a_byte) == (2e-3, 3e-9)
    assert Recording.calls == 15


# --- hierarchical ---


@pytest.mark.parametrize("hosts", [1, 2, 3, 5])
@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "split_dense_4"])
def test_hierarchical_is_the_scheme_on_the_sums_of_hosts(scheme, per_host, hosts):
    codec = dr.Codec(sparsifier_of(scheme), *LOSSY)
    gradients = gradients_of(hosts * per_host, 300)
    sums = []
    for host in range(hosts):
        sums.append(np.add.accumulate(gradients[host * per_host : (host + 1) * per_host])[-1])
    expected_jobs = jobs_of(codec, dr.Residual(), sums, step=1)
    for host, job in enumerate(expected_jobs):
        job.rank = host * per_host  # keys the rounding
    expected = Simulator(hosts).run(SCHEMES[scheme], expected_jobs)
    jobs = jobs_of(codec, dr.Residual(), gradients, step=1)
    outcomes = Simulator(len(jobs)).run(dr.Hierarchical(SCHEMES[scheme], per_host), jobs)
    for outcome in outcomes:
        same_bits(dense_of(outcome, jobs), dense_of(expected[0], expected_jobs) + np.float32(0))
    for rank, job in enumerate(jobs):
        kept = np.zeros(300, dtype=np.float32) if rank % per_host else kept_of(expected_jobs[rank // per_host])
        same_bits(kept_of(job), kept)
    assert_mass_balance(gradients, None, dense_of(outcomes[0], jobs), jobs, terms=12 * len(jobs))


@pytest.mark.parametrize("who", [0, 1, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_hierarchical_failures_and_nan(scheme, who):
    codec = dr.Codec(sparsifier_of(scheme), *LOSSY)
    jobs = jobs_of(codec, dr.Residual(), gradients_of(6, 200), shapes=[80, 120])
    jobs[who].members[1] = Member.failed("tensor1", 120, OSError("no memory left"))
    for outcome in Simulator(6).run(dr.Hierarchical(SCHEMES[scheme], 2), jobs):
        assert isinstance(outcome, dr.PeerFailed)
        assert f"rank {who}: OSError: no memory left" in str(outcome)
    gradients = gradients_of(6, 200)
    gradients[who][150] = np.inf
    jobs = jobs_of(codec, dr.Residual(), gradients, shapes=[80, 120])
    for outcome in Simulator(6).run(dr.Hierarchical(SCHEMES[scheme], 2), jobs):
        assert np.isnan(dense_of(outcome, jobs)).all()


@pytest.mark.parametrize(("arguments", "message"), [((3,), "got 3"), ((dr.Hierarchical(dr.Allgather()),), "another communicator"), ((dr.Allgather(), 0), "got 0")])
def test_hierarchical_settings(arguments, message):
    with pytest.raises(dr.InvalidArgument, match=message):
        dr.Hierarchical(*arguments)
