"""Test keep-the-largest, put-back, add and merge.

The native core equals the NumPy oracle bit for bit.
"""

import subprocess
import sys

import numpy as np
import pytest
from codecs_table import MEMORIES, gradient

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.numpy_backend import (
    add_sparse_numpy,
    decode_sum_sparse,
    keep_largest_numpy,
    put_back_numpy,
)

LARGEST = np.finfo(np.float32).max
SIMD_LEVELS = range(_native.simd_level() + 1)
#: few distinct magnitudes, which cause ties, and all kinds of finite numbers
POOLS = (
    np.array([1, -1, 2, -2, 0.5], dtype=np.float32),
    np.array([0, -0.0, 1e-45, -1e-45, 1, LARGEST, -LARGEST], dtype=np.float32),
    gradient(997),
)


def bits(arrays):
    return [np.asarray(array).view(np.uint32).tolist() for array in arrays]


def sparse(random, d, start=0):
    """Return (indices, values) of a random sparse tensor of ``d`` elements from ``start``."""
    count = int(random.choice([0, 1, d // 2, d, random.integers(d + 1)]))
    indices = np.sort(random.choice(d, count, replace=False)).astype(np.uint32)
    pool = POOLS[random.integers(len(POOLS))]
    return indices + np.uint32(start), random.choice(pool, count).astype(np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_keep_largest(seed):
    random = np.random.default_rng(seed)
    for _ in range(10):
        indices, values = sparse(random, int(random.integers(1, 3000)))
        k = int(random.choice([0, 1, indices.size, 2**40, random.integers(indices.size + 2)]))
        expected = bits(keep_largest_numpy(indices, values, k, native=False))
        for simd in SIMD_LEVELS:
            assert bits(keep_largest_numpy(indices, values, k, simd=simd)) == expected
        kept, kept_values, rest, rest_values = keep_largest_numpy(indices, values, k)
        assert kept.size == min(k, indices.size)
        if kept.size and rest.size:
            assert np.abs(kept_values).min() >= np.abs(rest_values).max()


@pytest.mark.parametrize("memory", MEMORIES)
def test_put_back(memory):
    random = np.random.default_rng(5)
    for _ in range(100):
        d, start = int(random.integers(1, 2000)), int(random.choice([0, 7, 2**31]))
        indices, values = sparse(random, d, start)
        states = []
        held = [random.choice(np.concatenate(POOLS), d) for _ in MEMORIES[memory].state]
        for native in (True, False):
            state = tuple(array.copy() for array in held)
            put_back_numpy(MEMORIES[memory], state, indices, values, start, native=native)
            states.append(bits(state))
        assert states[0] == states[1]


def test_add_sparse():
    random = np.random.default_rng(6)
    for _ in range(200):
        d, start = int(random.integers(1, 2000)), int(random.choice([0, 7, 2**31]))
        scale = float(random.choice([1, 0.5, -1 / 3, 3.0]))
        indices, values = sparse(random, d, start)
        held = random.choice(np.concatenate(POOLS), d)
        outs = [held.copy(), held.copy()]
        largest = [
            add_sparse_numpy(indices, values, out, scale, start, native=native)
            for out, native in zip(outs, (True, False))
        ]
        assert bits(outs[:1]) == bits(outs[1:])
        np.testing.assert_equal(np.float32(largest[0]), np.float32(largest[1]))


@pytest.mark.parametrize("index", [dr.RawIndex(), dr.Rice()], ids=repr)
def test_merging_adds_in_the_order_of_the_messages(index):
    random = np.random.default_rng(7)
    codec = dr.Codec(dr.TopK(k=1), index=index)
    for _ in range(100):
        d, dense, support = int(random.integers(1, 2000)), None, None
        payloads = []
        for _ in range(random.integers(1, 6)):
            indices, values = sparse(random, d)
            values = np.where(np.abs(values) > 1e30, np.float32(3), values)
            payloads.append(codec.encode_sparse(indices, values.copy(), d)[0])
            if dense is None:
                dense, support = np.zeros(d, np.float32), np.zeros(d, bool)
            # the first value of an element is copied, so -0.0 stays
            dense[indices] = np.where(support[indices], dense[indices] + values, values)
            support[indices] = True
            if dr.inspect(payloads[-1])["k"] == d:  # all elements were sent
                support[:] = True
        found, sums = decode_sum_sparse(payloads, d)
        np.testing.assert_array_equal(found, np.flatnonzero(support))
        np.testing.assert_array_equal(sums, dense[support])
        again = np.zeros(d, np.float32)
        for payload in payloads:
            dr.decode_sum([payload], again)
        np.testing.assert_array_equal(again[found], sums)


def test_the_memory_of_a_sum_grows_with_the_payloads_and_not_with_their_square():
    program = """if True:
        import resource
        import numpy as np
        import deepreduce_hvd as dr

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        codec, d, k, ranks = dr.Codec(dr.TopK(k=1), index=dr.Rice()), 2**31 - 1, 20_000, 200
        starts = np.arange(k, dtype=np.uint32) * np.uint32(d // k)
        values = np.ones(k, dtype=np.float32)
        payloads = [codec.encode_sparse(starts + np.uint32(r), values, d)[0] for r in range(ranks)]
        before = peak()
        found, sums = dr.decode_sum_sparse(payloads, d)
        assert found.size == sums.size == ranks * k
        print((peak() - before) / (8 * found.size))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # two partial sums, the result, and what each payload decodes to
    assert float(done.stdout) < 6


@pytest.mark.parametrize(
    ("indices", "start", "message"),
    [
        ([3, 3], 0, "expected ascending distinct"),
        ([4, 2], 0, "expected ascending distinct"),
        ([2, 10], 0, "expected less than d = 10, got 10"),
        ([6, 9], 7, "expected at least 7, got 6"),
        ([7, 17], 7, r"expected less than start \+ d = 17, got 17"),
    ],
)
def test_wrong_indices_change_nothing(indices, start, message):
    indices = np.array(indices, dtype=np.uint32)
    values, array = np.ones(indices.size, np.float32), np.zeros(10, np.float32)
    for work in (
        lambda: put_back_numpy(dr.Residual(), (array,), indices, values, start),
        lambda: add_sparse_numpy(indices, values, array, 1.0, start),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=message):
            work()
        assert not array.any()


def test_as_many_values_as_indices():
    indices, values = np.arange(3, dtype=np.uint32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="values: expected as many as indices, 3, got 2"):
        _native.keep_largest(indices, values, 1)
