"""Test encode_sparse and select: the native core equals the NumPy oracle, and invariants hold."""

import itertools

import numpy as np
import pytest
from codecs_table import INDEX, LOSSLESS, MEMORIES, SPARSIFIERS, VALUE, gradient, inputs
from sampling import parametrize_product

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.numpy_backend import encode_sparse_numpy, select_numpy

INPUTS = inputs()
SIMD_LEVELS = range(_native.simd_level() + 1)


def given(count, d, key=5):
    """Return (indices, values) of ``count`` of d elements, a few of which are 0."""
    indices = (
        dr.RandomK(k=count).select(np.zeros(d, dtype=np.float32), key).astype(np.uint32)
        if count
        else np.zeros(0, dtype=np.uint32)
    )
    values = gradient(count, key)
    values[::17] = 0
    return indices, values


CASES = {
    "none": (0, 500),
    "empty": (0, 0),
    "one": (1, 1),
    "one_of_many": (1, 4000),
    "some": (40, 4000),
    "half": (900, 1800),
    "all": (300, 300),
}


@parametrize_product(index=INDEX, value=VALUE, case=CASES)
def test_native_equals_oracle_and_nothing_is_lost(index, value, case):
    codec = dr.Codec(dr.TopK(0.5), index=INDEX[index], value=VALUE[value])
    count, d = CASES[case]
    indices, values = given(count, d)
    results = []
    for native, simd in [(False, -1), *((True, level) for level in SIMD_LEVELS)]:
        lacks = values.copy()
        payload, added, added_values = encode_sparse_numpy(
            codec, indices, lacks, d, 1, 2, 3, 4, native=native, simd=simd
        )
        results.append(
            (payload.tobytes(), lacks.tobytes(), added.tobytes(), added_values.tobytes())
        )
    assert len(set(results)) == 1
    whole = np.zeros(d)
    whole[indices] = values
    kept = np.zeros(d)
    kept[indices] = lacks
    kept[added] = added_values
    assert not np.isin(added, indices).any()
    np.testing.assert_allclose(
        dr.decode(payload) + kept, whole, rtol=0, atol=2.0**-22 * np.abs(values).max(initial=0)
    )


@pytest.mark.parametrize("index", LOSSLESS)
def test_it_equals_encode_of_the_same_elements(index):
    """Separate selection and encoding give the same bytes as encode.

    Index codecs that send elements that were not selected are an exception.
    """
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=dr.QSGD(bits=4))
    values, residual = gradient(3000), gradient(3000, 9)
    copy = residual.copy()
    payload = codec.encode(values, residual, step=1, seed=2, tensor=3, rank=4)
    indices, selected, _ = select_numpy(
        codec, dr.Residual(), values, (copy,), seed=2, step=1, tensor=3
    )
    again, _, _ = codec.encode_sparse(indices, selected, 3000, step=1, seed=2, tensor=3, rank=4)
    assert again.tobytes() == payload.tobytes()
    copy[indices] += selected
    np.testing.assert_array_equal(copy, residual)


@parametrize_product(memory=MEMORIES, sparsifier=SPARSIFIERS, case=INPUTS, taken=[False, True])
def test_selection_equals_its_oracle(case, sparsifier, memory, taken):
    values, memory = INPUTS[case], MEMORIES[memory]
    codec = dr.Codec(SPARSIFIERS[sparsifier])
    chosen = np.arange(0, values.size, 3, dtype=np.uint32) if taken else None
    results = []
    ways = [(False, -1, False), *itertools.product([True], SIMD_LEVELS, [False, True])]
    for native, simd, finite in ways:
        state = tuple(gradient(values.size, 20 + i) for i in range(len(memory.state)))
        indices, selected, _ = select_numpy(
            codec,
            memory,
            values,
            state,
            seed=1,
            step=2,
            tensor=3,
            given=chosen,
            native=native,
            simd=simd,
            finite=finite,
        )
        results.append((indices.tobytes(), selected.tobytes(), *(part.tobytes() for part in state)))
    assert len(set(results)) == 1
    if memory == dr.Residual():
        assert (state[0][indices] == 0).all()


def test_a_gradient_that_is_not_finite_selects_nothing():
    bad = gradient(100)
    bad[7] = np.inf
    residual = gradient(100, 3)
    for native in (True, False):
        kept = residual.copy()
        indices, values, _ = select_numpy(
            dr.Codec(dr.TopK(0.1)), dr.Residual(), bad, (kept,), native=native
        )
        assert indices is None and values is None
        np.testing.assert_array_equal(kept, residual)
    for native in (True, False):
        values = bad[:10].copy()
        payload, added, _ = encode_sparse_numpy(
            dr.Codec(dr.TopK(0.1)), np.arange(10, dtype=np.uint32), values, 100, native=native
        )
        assert dr.inspect(payload)["non_finite"] and not added.size
        np.testing.assert_array_equal(values, bad[:10])


@pytest.mark.parametrize(
    ("indices", "values", "d", "message"),
    [
        ([3, 2], [1, 1], 10, "ascending"),
        ([2, 2], [1, 1], 10, "ascending"),
        ([2, 10], [1, 1], 10, "10"),
        ([0, 1, 2], [1, 1, 1], 2, "2"),
        ([1], [1, 1], 10, r"expected .*shape \(1,\), got .*\(2,\)"),
        ([0], [1], 2**31, "at most 2147483647"),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_bad_arguments(indices, values, d, message, native):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        encode_sparse_numpy(
            dr.Codec(dr.TopK(0.1)),
            np.array(indices, dtype=np.uint32),
            np.array(values, dtype=np.float32),
            d,
            native=native,
        )


def test_memory_is_in_proportion_to_what_is_given():
    """With two billion virtual elements, no memory of that size is used."""
    indices = np.array([5, 1 << 20, (1 << 31) - 3], dtype=np.uint32)
    values = np.array([1, -2, 3], dtype=np.float32)
    codec = dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.RawValue())
    payload, _, _ = codec.encode_sparse(indices, values, (1 << 31) - 1)
    found, decoded = dr.decode_sum_sparse([payload], (1 << 31) - 1)
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(decoded, np.array([1, -2, 3], dtype=np.float32))
    assert (values == 0).all()
