"""Test sums of sparse vectors on simulated ranks against dense sums; arguments and errors."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from codecs_table import gradient
from simulated_ranks import same_bits

import deepreduce_hvd as dr
from deepreduce_hvd import sparse_vectors
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.given_vectors import GivenVector, GivenVectorSum
from deepreduce_hvd.communicators.simulator import SimulatedTransport, Simulator

SCHEMES = {
    "allgather": dr.Allgather(),
    "split": dr.SplitAllgather(),
    "split_never_dense": dr.SplitAllgather(dense=None),
    "recursive_doubling": dr.RecursiveDoubling(),
    "gtopk": dr.GTopK(),
    "gtopk_tree": dr.GTopK(form="tree"),
}
PAIR = SimulatedTransport((0, 1), 0)
CODECS = {
    "lossless": (dr.Rice(), dr.RawValue()),
    "lossy_values": (dr.Rice(), dr.QSGD(bits=4)),
    "lossy_indices": (dr.Bloom(fpr=0.05, policy="p0"), dr.RawValue()),
    "sorted_values": (dr.EliasFano(), dr.FitPoly()),
    "one_bit": (dr.RawIndex(), dr.LloydMax(bits=1)),
}


def vectors_of(size, d, counts, seed):
    """Return (indices, values) of every rank; ranks have about half of the indices in common."""
    random = np.random.default_rng(seed)
    found = []
    for rank in range(size):
        count = min(int(random.choice(counts)), d)
        few = random.permutation(d if d < 5000 else 5000)[: count // 2]
        indices = np.unique(np.concatenate([few, random.integers(0, d, count - few.size)]))
        values = gradient(indices.size, 10 * seed + rank) + np.float32(0)
        values[::13] = 0
        found.append((indices.astype(np.uint32), values))
    return found


def run(scheme, codecs, given, d, ds=None):
    """Return ([sum or exception of each rank], [vector of each rank])."""
    vectors = [
        one
        if isinstance(one, GivenVector)
        else GivenVector("v", *one, d if ds is None else ds[rank], rank)
        for rank, one in enumerate(given)
    ]
    total = GivenVectorSum(SCHEMES[scheme], *CODECS[codecs], {"op": "Sum"})
    return Simulator(len(given)).run(total, vectors), vectors


def dense_of(d, *sparse):
    dense = np.zeros(d)
    for indices, values in sparse:
        np.add.at(dense, indices, values.astype(np.float64))
    return dense


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sum_and_rests_are_what_was_given(scheme, codecs):
    for seed, size in enumerate((1, 2, 3, 4, 5, 8, 13)):
        d = (1, 40, 3000, 20_000)[seed % 4]
        given = vectors_of(size, d, [0, 1, 30, d // 2, d], seed)
        originals = [(indices.copy(), values.copy()) for indices, values in given]
        totals, vectors = run(scheme, codecs, given, d)
        sums = [sparse_vectors._finite_sum("v", total, 1) for total in totals]
        for indices, values in sums:
            np.testing.assert_array_equal(indices, sums[0][0])
            same_bits(values, sums[0][1])
            assert (np.diff(indices.astype(np.int64)) > 0).all() and values.all()
        for (indices, values), original in zip(given, originals):  # the arguments are not changed
            np.testing.assert_array_equal(indices, original[0])
            np.testing.assert_array_equal(values, original[1])
        expected = dense_of(d, *given)
        rests = [vector.rest() for vector in vectors]
        magnitude = dense_of(d, *((indices, abs(values)) for indices, values in given)).max()
        np.testing.assert_allclose(
            dense_of(d, sums[0], *rests),
            expected,
            rtol=0,
            atol=4 * size * 2.0**-24 * max(magnitude, 1),
            err_msg=f"{size} ranks",
        )
        if codecs == "lossless" and "gtopk" not in scheme:
            assert not any(indices.size for indices, _ in rests)
        if "gtopk" in scheme and codecs == "lossless":
            assert sums[0][0].size <= max(indices.size for indices, _ in given)


def test_allgather_adds_in_the_order_of_ranks():
    given = vectors_of(5, 500, [200], 3)
    totals, _ = run("allgather", "lossless", given, 500)
    dense = np.zeros(500, dtype=np.float32)
    for indices, values in given:
        dense[indices] += values
    indices, values = sparse_vectors._finite_sum("v", totals[2], 5)
    np.testing.assert_array_equal(indices, np.flatnonzero(dense))
    same_bits(values, dense[indices] / np.float32(5))


@pytest.mark.parametrize("codecs", ["lossless", "lossy_values"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_that_flush_denormal_numbers_change_nothing(scheme, codecs):
    flush = pytest.importorskip("torch").set_flush_denormal
    if not flush(False):
        pytest.skip("this processor cannot flush denormal numbers")
    random, runs = np.random.default_rng(1), []
    given = [
        (indices, values * random.choice(np.float32([1e-44, 1e-40, 1e-38]), values.size))
        for indices, values in vectors_of(5, 500, [100, 200], 4)
    ]
    for flushes in (False, True):
        flush(flushes)
        try:
            totals, vectors = run(scheme, codecs, given, 500)
            found = [
                *(sparse_vectors._finite_sum("v", total, 3) for total in totals),
                *(vector.rest() for vector in vectors),
            ]
        finally:
            flush(False)
        runs.append([array.tobytes() for pair in found for array in pair])
        few = [(values != 0) & (abs(values) < 1e-38) for _, values in found]
        assert any(some.any() for some in few[:5])
        if codecs == "lossy_values" or "gtopk" in scheme:
            assert any(some.any() for some in few[5:])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_array_of_d_elements(scheme):
    d = 2**31 - 1
    given = vectors_of(3, d, [2000], 1)
    given[0][0][-1] = d - 1
    tracemalloc.start()
    try:
        totals, vectors = run(scheme, "lossless", given, d)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, peak
    found = dict(zip(*(part.tolist() for part in sparse_vectors._finite_sum("v", totals[1], 1))))
    rests = {}
    for vector in vectors:
        for index, value in zip(*(part.tolist() for part in vector.rest())):
            rests[index] = rests.get(index, 0) + value
    expected = {}
    for indices, values in given:
        for index, value in zip(indices.tolist(), values.tolist()):
            expected[index] = expected.get(index, 0) + value
    for index, value in expected.items():
        got = found.get(index, 0) + rests.get(index, 0)
        assert abs(got - value) <= 1e-5 * max(map(abs, expected.values())), index


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rank_that_fails_is_heard_by_all(scheme):
    given = vectors_of(4, 100, [20], 5)
    given[2] = GivenVector.failed("v", dr.InvalidArgumentError("values: expected more"), 2)
    outcomes, _ = run(scheme, "lossless", given, 100)
    for rank, outcome in enumerate(outcomes):
        if rank == 2:
            assert outcome is given[2].members[0].failure
        else:
            assert isinstance(outcome, dr.PeerFailedError)
            assert str(outcome) == "v: rank 2: InvalidArgumentError: values: expected more"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rank_that_fails_later_is_heard_by_all(scheme, monkeypatch):
    given = vectors_of(3, 100, [20], 5)
    vectors = [GivenVector("v", *one, 100, rank) for rank, one in enumerate(given)]

    def no_memory(*_):
        raise MemoryError("none left")

    vectors[1].put_back = no_memory
    outcomes, _ = run(scheme, "lossy_values", vectors, 100)
    for outcome in outcomes:
        assert isinstance(outcome, dr.PeerFailedError), outcome
        assert "rank 1: MemoryError: none left" in str(outcome)


def test_ranks_that_differ_all_raise():
    given = vectors_of(3, 100, [20], 5)
    outcomes, _ = run("allgather", "lossless", given, 100, ds=[100, 100, 101])
    for outcome in outcomes:
        assert isinstance(outcome, dr.InvalidArgumentError)
        assert (
            str(outcome)
            == "v: expected the same d on all ranks, got 100 on rank 0 and 101 on rank 2"
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_overflow_raises_on_all(scheme):
    huge = np.array([5], dtype=np.uint32), np.array([3e38], dtype=np.float32)
    totals, _ = run(scheme, "lossless", [huge, huge, huge], 100)
    for total in totals:
        with pytest.raises(dr.InvalidArgumentError, match="within float32"):
            sparse_vectors._finite_sum("v", total, 1)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"count": "3", "settings": {}}',
        b'{"count": 3, "step": 0, "known": [], "settings": []}',
        b'{"count": 3, "step": 0, "settings": {}}',
        b'{"count": 3, "step": 0, "known": 1.5, "settings": {}}',
        b'{"count": 3, "step": 0, "known": [1, -2], "settings": {}}',
        b'{"count": 3, "step": 0, "known": [1, NaN], "settings": {}}',
        b'{"count": 3, "step": 0, "known": [1, Infinity], "settings": {}}',
        b'{"count": 3, "step": 0, "known": ["1"], "settings": {}}',
        b'{"count": 3, "settings": {}}',
        b'{"count": 3, "step": "0", "settings": {}}',
        b"[" * 4000,
        b"\xff\xfe",
        b'{"failure": 3}',
    ],
)
def test_descriptions_of_other_ranks_are_checked(text):
    vector = GivenVector("v", *vectors_of(1, 10, [3], 1)[0], 10)
    own = GivenVectorSum(dr.Allgather(), *CODECS["lossless"], {})._description(vector, PAIR)
    hostile = np.concatenate([own, dr._native.write_notice(text)])
    with pytest.raises(dr.CorruptPayloadError, match="expected a description from each of 2 ranks"):
        GivenVectorSum._compare(vector, hostile, 2)
    with pytest.raises(dr.CorruptPayloadError):
        GivenVectorSum._compare(vector, own, 2)


def test_random_choices_differ_between_calls():
    """Their mean is the vector, with a name too. Ranks that joined later count fewer calls."""
    indices = np.arange(50, dtype=np.uint32)
    values = np.random.default_rng(3).standard_normal(50).astype(np.float32)

    def summed(*steps):
        given = [
            GivenVector("v", indices, values, 100, rank, step) for rank, step in enumerate(steps)
        ]
        total = GivenVectorSum(dr.RecursiveDoubling(), dr.Rice(), dr.QSGD(bits=2), {})
        results = Simulator(len(steps)).run(total, given)
        found = [dense_of(100, result.sparse(0, 1.0)) for result in results]
        assert all(np.array_equal(one, found[0]) for one in found)
        assert {one.step for one in given} == {max(steps)}
        return found[0]

    np.testing.assert_array_equal(summed(0, 7, 2), summed(7, 7, 7))
    mean = np.mean([summed(step, step) for step in range(400)], axis=0)[:50] / 2
    assert np.linalg.norm(mean - values) < 0.2 * np.linalg.norm(values)


def test_long_settings_fit_and_differ():
    vector = GivenVector("v", *vectors_of(1, 10, [3], 1)[0], 10)
    described = [
        GivenVectorSum(dr.Allgather(), *CODECS["lossless"], {"op": 5000 * "é" + end})._description(
            vector, PAIR
        )
        for end in "ab"
    ]
    assert all(one.size < 4096 for one in described)
    with pytest.raises(dr.InvalidArgumentError, match="expected the same op on all ranks"):
        GivenVectorSum._compare(vector, np.concatenate(described), 2)
    failed = GivenVector.failed("v", ValueError(5000 * "\x00"))
    messages = wire.split(
        GivenVectorSum(dr.Allgather(), *CODECS["lossless"], {})._description(failed, PAIR)
    )
    assert len(messages) == 1 and messages.notices[0].endswith(b'"}')


PLACES, V = np.array([7, 2]), np.array([1, 2], dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PLACES, V, 0), "d: expected an integer of at least 1 and at most 2147483647, got 0"),
        ((PLACES, V, 2**31), "d: expected .*, got 2147483648"),
        ((PLACES, V, 7.0), r"d: expected .*, got 7\.0"),
        ((PLACES, V, 7), "indices: expected at least 0 and less than d = 7, got 7"),
        ((np.array([-1, 2]), V, 9), "indices: expected at least 0 .*, got -1"),
        ((np.array([3, 3]), V, 9), "indices: expected distinct ones, got 3 more than once"),
        ((PLACES.astype(float), V, 9), "indices: expected a 1-D int32, .* array, got float64"),
        ((PLACES.reshape(1, 2), V, 9), "indices: expected a 1-D .* got int64 of shape"),
        (([1, 2], V, 9), "indices: expected a 1-D .* got list"),
        ((PLACES, V.astype(float), 9), "values: expected a 1-D float32 array, got float64"),
        ((PLACES, V[:1], 9), "values: expected as many as indices, 2, got 1"),
        (
            (PLACES, V * np.float32(np.nan), 9),
            "values: expected finite numbers, got nan at position 0",
        ),
        ((PLACES, np.ma.array(V, mask=[1, 0]), 9), "values: expected .* masked"),
    ],
)
def test_bad_vectors(arguments, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        sparse_vectors._expect_vector("numpy", *arguments)


def test_indices_in_any_order_and_dtype():
    for dtype in ("int32", "int64", "uint32", "uint64"):
        indices, values = sparse_vectors._expect_vector("numpy", PLACES.astype(dtype), V, 8)
        assert indices.dtype == np.uint32
        assert indices.tolist() == [2, 7] and values.tolist() == [2, 1]


@pytest.mark.parametrize(
    "communicator", [dr.CLTK(), dr.SharedRandomK(), dr.Hierarchical(dr.GTopK()), "Allgather", None]
)
def test_communicators_that_select_cannot_sum_given_vectors(communicator):
    with pytest.raises(
        dr.InvalidArgumentError, match="communicator: expected a communicator other than"
    ):
        GivenVectorSum.expect_communicator(communicator)


def test_numbers_start_again_when_horovod_does():
    """Names of collectives start again after Horovod restarts.

    Otherwise, in elastic training, ranks that join would use other names, and all would wait
    forever.
    """
    pytest.importorskip("horovod.torch")
    program = """
import horovod.torch as hvd
import numpy as np
import deepreduce_hvd as dr

one = np.array([1]), np.ones(1, np.float32), 10
for _ in range(2):
    hvd.init()
    handles = [dr.sparse_allreduce_async(*one) for _ in range(2)]
    print(*[handle._exchange.channel.name.split(".")[-2] for handle in handles])
    [handle.wait() for handle in handles]
    hvd.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1", "0", "1"], done.stdout + done.stderr


def test_before_init(monkeypatch):
    monkeypatch.setattr(sparse_vectors, "_FRAMEWORKS", {"no_framework": "nothing"})
    with pytest.raises(dr.InvalidArgumentError, match=r"expected hvd\.init\(\)"):
        dr.sparse_allreduce(PLACES, V, 9)


def test_a_process_set_that_is_none():
    hvd = pytest.importorskip("horovod.torch")
    hvd.init()
    for wrong in ([0], 5, "x"):
        with pytest.raises(dr.InvalidArgumentError, match="process set: expected a horovod Proc"):
            dr.sparse_allreduce(PLACES, V, 9, process_set=wrong)


def test_a_sum_that_fails_does_not_stop_later_ones():
    """Handles of sums that failed may be kept, as by a trainer that starts again."""
    pytest.importorskip("horovod.torch")
    program = """
import horovod.torch as hvd
import numpy as np
import deepreduce_hvd as dr

one = np.array([1]), np.ones(1, np.float32), 10
hvd.init()
fails = dr.sparse_allreduce_async(*one, name="x")
other = dr.sparse_allreduce_async(*one, name="y")
transport = fails._exchange._transport

def wait(handle):
    raise RuntimeError("a rank has left")

fails._exchange._transport = type("Failing", (), {
    "test": staticmethod(transport.test), "wait": staticmethod(wait), "pause": transport.pause,
})()
print(other.wait().values, fails.poll())
print(dr.sparse_allreduce(*one, name="y").values)
for _ in range(2):
    try:
        fails.wait()
    except RuntimeError as error:
        print(error)
print(dr.sparse_allreduce(*one, name="x").values)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = ["[1.] True", "[1.]", "a rank has left", "a rank has left", "[1.]"]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr
