"""Test that memories equal the NumPy classes at every SIMD level, and that they stay finite."""

import numpy as np
import pytest
from codecs_table import MEMORIES, gradient
from native_and_numpy import SIMD_LEVELS, selected, sent
from sampling import parametrize_product

import deepreduce_hvd as dr


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "dtype, bad",
    [
        ("float32", np.nan),
        ("float32", -np.inf),
        ("float16", np.inf),
        ("float64", np.nan),
        ("float64", 1e39),
    ],
)
def test_non_finite_leaves_the_memory(dtype, bad, memory, simd):
    memory = MEMORIES[memory]
    state = tuple(gradient(5000, key=17) for _ in memory.state)
    for at in (0, 2047, 2048, 4999):
        values = gradient(5000).astype(dtype)
        values[at] = bad
        payload, after, hint = sent(
            dr.Codec(dr.TopK(0.01)), values, state, memory, threshold=0.25, simd=simd
        )
        assert payload == sent(dr.Codec(dr.TopK(0.01)), values, state, memory, native=False)[0]
        assert np.isnan(dr.decode(np.frombuffer(payload, dtype=np.uint8))).all()
        assert hint == 0.25
        for array, before in zip(after, state):
            np.testing.assert_array_equal(array.view(np.uint32), before.view(np.uint32))


@parametrize_product(memory=[name for name in MEMORIES if name != "no_memory"], simd=SIMD_LEVELS)
def test_sums_saturate(memory, simd):
    memory = MEMORIES[memory]
    huge = np.float32(3.4e38)
    values = np.where(np.arange(100) % 2, huge, -huge).astype(np.float32)
    state = tuple(values.copy() for _ in memory.state)
    codec = dr.Codec(dr.TopK(k=5))
    native, after, _ = sent(codec, values, state, memory, simd=simd)
    oracle, expected, _ = sent(codec, values, state, memory, native=False)
    assert native == oracle
    assert (np.abs(selected(native)[1]) == np.finfo(np.float32).max).all()
    for array, other in zip(after, expected):
        np.testing.assert_array_equal(array, other)
        assert np.isfinite(array).all()


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "no_memory"])
@pytest.mark.parametrize("codec", [
    dr.Codec(dr.TopK(0.3), index=dr.Bloom(fpr=0.1, policy="naive")),
    dr.Codec(dr.TopK(0.3), value=dr.QSGD(bits=1)),
    dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=1)),
], ids=["bloom_naive", "qsgd", "all_qsgd"])  # fmt: skip
def test_what_a_lossy_codec_leaves_saturates(codec, memory, simd):
    """A huge value that is decoded with the other sign must not leave infinity in the memory."""
    memory = MEMORIES[memory]
    values = gradient(3000) * np.float32(3.4e38)
    state = expected = tuple(np.zeros_like(values) for _ in memory.state)
    reached = False
    for step in range(4):
        payload, state, _ = sent(codec, values, state, memory, simd=simd, step=step)
        oracle, expected, _ = sent(codec, values, expected, memory, native=False, step=step)
        assert payload == oracle
        for array, other in zip(state, expected):
            np.testing.assert_array_equal(array.view(np.uint32), other.view(np.uint32))
            assert np.isfinite(array).all()
        reached |= bool((np.abs(state[0]) == np.finfo(np.float32).max).any())
    assert reached or isinstance(memory, dr.LowPass)  # LowPass damps its residual
