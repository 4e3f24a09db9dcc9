"""Test that memories equal the NumPy classes at every SIMD level.

They also follow their formulas, and they stay finite.
"""

import numpy as np
import pytest
from codecs_table import MEMORIES, gradient
from native_and_numpy import SIMD_LEVELS, largest, selected, sent
from sampling import parametrize_product

import deepreduce_hvd as dr
from deepreduce_hvd import _native


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


def test_low_pass_by_its_formula():
    m, g = gradient(3000, key=3), gradient(3000)
    payload, (after,), _ = sent(dr.Codec(dr.TopK(0.1)), g, (m,), dr.LowPass(0.3))
    s = dr.decode(np.frombuffer(payload, dtype=np.uint8)).astype(np.float64)
    np.testing.assert_allclose(
        after, 0.7 * m + 0.3 * (m.astype(np.float64) + g - s), rtol=0, atol=1e-6
    )


def test_low_pass_of_one_is_the_residual():
    m, g = gradient(3000, key=3), gradient(3000)
    low_pass, residual = (
        sent(dr.Codec(dr.TopK(0.1)), g, (m,), memory) for memory in (dr.LowPass(1), dr.Residual())
    )
    assert low_pass[0] == residual[0]
    np.testing.assert_array_equal(low_pass[1], residual[1])


def test_momentum_correction_by_its_formula():
    v, u, g = gradient(3000, key=3), gradient(3000, key=4), gradient(3000)
    payload, (residual, velocity), _ = sent(
        dr.Codec(dr.TopK(0.1)), g, (v, u), dr.MomentumCorrection(0.9)
    )
    indices, values = selected(payload)
    expected_velocity = 0.9 * u.astype(np.float64) + g
    np.testing.assert_array_equal(indices, largest((v + expected_velocity.astype(np.float32)), 300))
    expected_residual = v + expected_velocity
    expected_residual[indices] -= values
    expected_velocity[indices] = 0
    np.testing.assert_allclose(residual, expected_residual, rtol=0, atol=1e-6)
    np.testing.assert_allclose(velocity, expected_velocity, rtol=0, atol=1e-6)
    assert (velocity[indices] == 0).all()


def test_momentum_correction_sends_what_momentum_sgd_sums():
    """Once all is sent, the sum is that of momentum SGD, restarted where elements were sent."""
    state = (np.zeros(50, dtype=np.float32), np.zeros(50, dtype=np.float32))
    total, velocity, expected = np.zeros(50), np.zeros(50), np.zeros(50)
    for step in range(6):
        values = gradient(50, key=60 + step)
        codec = dr.Codec(dr.NoneSparsifier() if step == 5 else dr.TopK(k=1))
        payload, state, _ = sent(codec, values, state, dr.MomentumCorrection(0.5), step=step)
        velocity = 0.5 * velocity + values
        expected += velocity
        total += dr.decode(np.frombuffer(payload, dtype=np.uint8))
        velocity[selected(payload)[0]] = 0
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
    assert not state[0].any() and not state[1].any()


@pytest.mark.parametrize("memory, parameter", [
    (dr.LowPass(0.5), 0), (dr.LowPass(0.5), 1.5), (dr.LowPass(0.5), np.nan),
    (dr.MomentumCorrection(), 1), (dr.MomentumCorrection(), -0.5),
])  # fmt: skip
def test_the_native_core_refuses_bad_memories(memory, parameter):
    fields = dr.Codec(dr.TopK(0.1)).fields(memory)
    fields[16] = parameter
    state = [gradient(100, key=3) for _ in memory.state]
    with pytest.raises(dr.InvalidArgumentError, match="expected.*got"):
        _native.encode(fields, gradient(100), 0, *state)
    for array in state:
        np.testing.assert_array_equal(array, gradient(100, key=3))
