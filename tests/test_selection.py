"""Selection with error feedback: exact for every input, hint and SIMD level; what the conformance
suite's rows cannot show.
"""

import numpy as np
import pytest
from codecs_table import MEMORIES, SPARSIFIERS, gradient
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays
from sampling import parametrize_product
from scipy.stats import chi2

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.numpy_backend import encode_numpy
from deepreduce_hvd.stages.sparsifiers.random_k import permuted

SIMD_LEVELS = range(_native.simd_level() + 1)
#: around the widths of vectors, of the passes' blocks and of the room for candidates
SIZES = (1, 7, 8, 9, 15, 16, 17, 31, 33, 2047, 2048, 2049, 4097, 16383, 16384, 16385, 20000)
HINTS = (0.0, -1.0, np.nan, np.inf, -np.inf, 1e-45, 1e-30, 1e-3, 0.1, 0.5, 1.0, 1e30, 3.4e38)


def sent(
    codec, values, state=(), memory=None, threshold=0.0, simd=-1, native=True, dtype=None, step=0
):
    """-> (payload's bytes, state after, next threshold); ``state`` is not changed."""
    state = tuple(array.copy() for array in state)
    memory = memory or (dr.Residual() if state else dr.NoMemory())
    data, threshold = encode_numpy(
        codec,
        memory,
        values,
        state,
        threshold,
        1,
        step,
        3,
        4,
        native=native,
        simd=simd,
        dtype=dtype,
    )
    return data.tobytes(), state, threshold


def selected(payload):
    return dr.decode_sum_sparse(
        [np.frombuffer(payload, dtype=np.uint8)],
        dr.inspect(np.frombuffer(payload, dtype=np.uint8))["d"],
    )


def largest(values, k):
    """The definition: sort by magnitude downwards, then by index; drop zeros; the first k,
    ascending.
    """
    order = np.lexsort((np.arange(values.size), -np.abs(values)))[:k]
    return np.sort(order[values[order] != 0])


def assert_top_k(values, k, threshold=0.0, simd=-1):
    payload, _, after = sent(dr.Codec(dr.TopK(k=k)), values, threshold=threshold, simd=simd)
    expected = largest(values, k)
    indices, kept = selected(payload)
    if indices.size == values.size:  # sent whole, zeros too
        np.testing.assert_array_equal(kept, values)
    else:
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(kept.view(np.uint32), values[expected].view(np.uint32))
    if expected.size == k:
        assert after == np.abs(values[expected]).min()


@parametrize_product(d=SIZES, simd=SIMD_LEVELS)
def test_top_k_at_every_size(d, simd):
    for values in (gradient(d), np.round(gradient(d) * 3).astype(np.float32)):
        for k in {1, 2, max(d // 100, 1), max(d // 3, 1)}:
            assert_top_k(values, k, simd=simd)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_hints_never_change_the_bytes(simd):
    for values, k in (
        (gradient(50_000), 500),
        (np.round(gradient(50_000) * 50).astype(np.float32), 700),
        (gradient(1000), 10),
    ):
        residual = np.roll(values, 1)
        codec = dr.Codec(dr.TopK(k=k))
        payload, (kept,), after = sent(codec, values, (residual,))
        for hint in (
            *HINTS,
            after,
            np.nextafter(np.float32(after), np.float32(9)),
            after * 0.97,
            after * 1.03,
        ):
            other, (kept_too,), after_too = sent(
                codec, values, (residual,), threshold=float(hint), simd=simd
            )
            assert other == payload, f"the hint {hint} changes the bytes"
            np.testing.assert_array_equal(kept_too, kept)
            assert after_too == after


def misleading():
    """name -> (d,) float32 whose sample, hint or order says little about its k-th magnitude."""
    d = 100_000
    ascending = np.arange(1, d + 1, dtype=np.float32)
    last_block = np.full(d, 1e-3, dtype=np.float32)
    last_block[-1500:] = gradient(1500) + 2
    few = np.zeros(d, dtype=np.float32)
    few[::3001] = -7
    return {
        "all equal": np.full(d, -0.5, dtype=np.float32), "ascending": ascending, "descending": ascending[::-1].copy(),
        "large ones at the end": last_block, "fewer non-zeros than k": few, "zeros": np.zeros(d, dtype=np.float32),
        "two values": np.where(np.arange(d) % 2, np.float32(1), np.float32(2)),
        "denormals": (np.arange(d) % 977).astype(np.uint32).view(np.float32),
        "one huge": np.concatenate([gradient(d - 1) * np.float32(1e-20), [np.float32(3e38)]]).astype(np.float32),
        "neighbours": (np.uint32(0x3F800000) + (np.arange(d) % 5003).astype(np.uint32)).view(np.float32),
    }  # fmt: skip


@parametrize_product(case=misleading(), simd=SIMD_LEVELS)
def test_misleading_inputs(case, simd):
    values = misleading()[case]
    for k in (1, 100, 1000):
        for hint in (0.0, 1e-40, 0.7, 1e38):
            assert_top_k(values, k, threshold=hint, simd=simd)


def test_a_large_tensor():
    values = np.random.default_rng(5).standard_normal(2_000_003).astype(np.float32)
    values[::7] = np.round(values[::7])
    downwards = np.lexsort((np.arange(values.size), -np.abs(values)))
    for k in (2000, 20_000, 200_000):
        expected = np.sort(downwards[:k])
        for hint in (0.0, 0.5, 2.0, 4.0):
            indices, kept = selected(sent(dr.Codec(dr.TopK(k=k)), values, threshold=hint)[0])
            np.testing.assert_array_equal(indices, expected)
            np.testing.assert_array_equal(kept, values[expected])


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float32, strategies.integers(1, 300), elements=strategies.floats(width=32, allow_nan=False, allow_infinity=False)),
    strategies.integers(1, 40), strategies.floats(width=32), strategies.sampled_from(list(SIMD_LEVELS)),
)  # fmt: skip
def test_top_k_of_anything(values, k, hint, simd):
    assert_top_k(values, k, threshold=hint, simd=simd)


@parametrize_product(memory=MEMORIES, sparsifier=SPARSIFIERS)
def test_simd_levels_and_sizes_agree_with_the_oracle(sparsifier, memory):
    codec, memory = dr.Codec(SPARSIFIERS[sparsifier]), MEMORIES[memory]
    for d in SIZES:
        states = {"oracle": tuple(gradient(d, key=31) for _ in memory.state)}
        states.update((simd, states["oracle"]) for simd in SIMD_LEVELS)
        hints = dict.fromkeys(states, 0.0)
        for step in range(2):
            values = gradient(d, key=40 + step)
            expected, states["oracle"], _ = sent(
                codec, values, states["oracle"], memory, native=False, step=step
            )
            for simd in SIMD_LEVELS:
                got, states[simd], hints[simd] = sent(
                    codec, values, states[simd], memory, hints[simd], simd, step=step
                )
                assert got == expected, (d, simd, step)
                for array, oracle in zip(states[simd], states["oracle"]):
                    np.testing.assert_array_equal(array.view(np.uint32), oracle.view(np.uint32))


@parametrize_product(
    dtype=["float32", "float16", "float64", "bfloat16"], memory=MEMORIES, simd=SIMD_LEVELS
)
def test_dtypes(dtype, memory, simd):
    """Every float16 and bfloat16 number, and float64 numbers around float32's edges, convert as
    NumPy says.
    """
    memory = MEMORIES[memory]
    if dtype == "float16":
        values = np.arange(2**16, dtype=np.uint16).view(np.float16)
        values = values[np.isfinite(values)]
    elif dtype == "bfloat16":
        values = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
        values = values[np.isfinite(values)]
    else:
        values = np.concatenate(
            [gradient(9000), [1e-40, -1e-45, 3e38, -3.4028234e38, 0.0, -0.0]]
        ).astype(dtype)
        values = (
            np.concatenate([values, [1e-46, 1e-300, 1 + 2**-24, 1 + 2**-30]])
            if dtype == "float64"
            else values
        )
    state = tuple(gradient(values.size, key=13) for _ in memory.state)
    for sparsifier in (dr.TopK(0.05), dr.TopK(1.0), dr.NoneSparsifier(), dr.Threshold(0)):
        codec = dr.Codec(sparsifier)
        if dtype == "bfloat16":
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
            native_state = tuple(array.copy() for array in state)
            data, _, _ = _native.encode(
                codec.fields(memory),
                halves,
                2,
                *native_state,
                *[None] * (2 - len(state)),
                seed=1,
                tensor=3,
                rank=4,
                simd=simd,
            )
            native = data.tobytes()
        else:
            native, native_state, _ = sent(codec, values, state, memory, simd=simd)
        oracle, oracle_state, _ = sent(
            codec, values, state, memory, native=False, dtype=2 if dtype == "bfloat16" else None
        )
        assert native == oracle
        for array, expected in zip(native_state, oracle_state):
            np.testing.assert_array_equal(array.view(np.uint32), expected.view(np.uint32))


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
    """A huge value that decodes to one of the other sign must not leave infinity in the memory."""
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
    assert reached or isinstance(memory, dr.LowPass)  # which damps what it keeps


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
    """Everything sent at every step: the sum of the sent is that of plain momentum, restarted where
    it was masked.
    """
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


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16, 17, 1000, 4096])
def test_random_permutation_is_one(d):
    np.testing.assert_array_equal(
        np.sort(permuted(99, d, np.arange(d, dtype=np.uint32))), np.arange(d)
    )


@pytest.mark.parametrize("d, k", [(3, 1), (10, 3), (33, 8)])
def test_random_k_is_uniform(d, k):
    draws = 6000
    counts = np.zeros(d)
    for step in range(draws):
        indices, _ = selected(
            sent(dr.Codec(dr.RandomK(k=k)), np.zeros(d, dtype=np.float32), step=step)[0]
        )
        assert indices.size == np.unique(indices).size == k
        counts[indices] += 1
    expected = draws * k / d
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), d - 1) > 1e-4


def test_random_k_pairs_are_uniform():
    draws, d = 6000, 7
    counts = np.zeros((d, d))
    for step in range(draws):
        a, b = selected(
            sent(dr.Codec(dr.RandomK(k=2)), np.zeros(d, dtype=np.float32), step=step)[0]
        )[0]
        counts[a, b] += 1
    expected = draws / (d * (d - 1) / 2)
    pairs = counts[np.triu_indices(d, 1)]
    assert pairs.sum() == draws
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), pairs.size - 1) > 1e-4


def test_random_k_is_the_same_on_all_ranks_and_new_at_every_step():
    codec = dr.Codec(dr.RandomK(0.01))
    ranks = [
        dr.decode_sum_sparse([codec.encode(gradient(10_000, key=rank), step=3, rank=rank)], 10_000)[
            0
        ]
        for rank in range(3)
    ]
    np.testing.assert_array_equal(ranks[0], ranks[1])
    np.testing.assert_array_equal(ranks[0], ranks[2])
    other = dr.decode_sum_sparse([codec.encode(gradient(10_000), step=4)], 10_000)[0]
    assert np.intersect1d(ranks[0], other).size < 20  # 1 in the mean
    tensor = dr.decode_sum_sparse([codec.encode(gradient(10_000), step=3, tensor=1)], 10_000)[0]
    assert np.intersect1d(ranks[0], tensor).size < 20


@settings(max_examples=100, deadline=None)
@given(
    arrays(
        np.float32,
        strategies.integers(1, 200),
        elements=strategies.sampled_from([0, -0.0, 1, -1, 2, -2, 1e-45, 3e38]),
    ),
    strategies.integers(1, 70),
)
def test_chunk_top_k_by_its_definition(values, chunk):
    expected = [
        start + int(np.argmax(np.abs(values[start : start + chunk])))
        for start in range(0, values.size, chunk)
        if values[start : start + chunk].any()
    ]
    payload, _, _ = sent(dr.Codec(dr.ChunkTopK(chunk=chunk), index=dr.RawIndex()), values)
    indices, kept = selected(payload)
    if indices.size < values.size:
        np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(kept, values[indices])
    np.testing.assert_array_equal(dr.ChunkTopK(chunk=chunk).select(values, 0), expected)


def test_threshold_is_exclusive_and_zero_keeps_all_non_zeros():
    values = np.zeros(1000, dtype=np.float32)
    values[:6] = [0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(1)), -0.75, 1e-45, -0.0]
    np.testing.assert_array_equal(selected(sent(dr.Codec(dr.Threshold(0.5)), values)[0])[0], [2, 3])
    np.testing.assert_array_equal(
        selected(sent(dr.Codec(dr.Threshold(0)), values)[0])[0], [0, 1, 2, 3, 4]
    )
    assert selected(sent(dr.Codec(dr.Threshold(3e38)), values)[0])[0].size == 0


def test_warm_up_falls_exponentially():
    sparsifier = dr.TopK(0.01, warmup_steps=4, warmup_ratio=0.16)
    ratios = [sparsifier.parameters(step)[0] for step in range(6)]
    np.testing.assert_allclose(ratios, [0.16, 0.08, 0.04, 0.02, 0.01, 0.01], rtol=1e-12)
    for step in range(6):
        payload, _, _ = sent(dr.Codec(sparsifier), gradient(1000), step=step)
        assert selected(payload)[0].size == int(ratios[step] * 1000)


@pytest.mark.parametrize("make, says", [
    (lambda: dr.TopK(), "one of ratio and k"), (lambda: dr.TopK(0.1, k=3), "one of ratio and k"), (lambda: dr.TopK(0), "ratio"),
    (lambda: dr.TopK(1), "float in"), (lambda: dr.RandomK(20), "float in"), (lambda: dr.TopK(1.5), "ratio"), (lambda: dr.TopK(np.nan), "ratio"), (lambda: dr.TopK(k=0), "k"), (lambda: dr.TopK(k=1.5), "k"),
    (lambda: dr.TopK(k=2**31), "k"), (lambda: dr.TopK(k=3, warmup_steps=2), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=-1), "warmup_steps"), (lambda: dr.TopK(0.1, warmup_steps=1.5), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=2, warmup_ratio=0), "warmup_ratio"),
    (lambda: dr.RandomK(), "one of ratio and k"), (lambda: dr.RandomK(-0.1), "ratio"), (lambda: dr.RandomK(k=np.inf), "k"),
    (lambda: dr.Threshold(-1), "at least 0"), (lambda: dr.Threshold(np.nan), "at least 0"), (lambda: dr.Threshold(np.inf), "at least 0"),
    (lambda: dr.ChunkTopK(), "one of ratio and chunk"), (lambda: dr.ChunkTopK(0), "ratio"), (lambda: dr.ChunkTopK(chunk=0), "chunk"),
    (lambda: dr.ChunkTopK(chunk=2.5), "chunk"), (lambda: dr.LowPass(0), "beta"), (lambda: dr.LowPass(1.1), "beta"),
    (lambda: dr.LowPass(np.nan), "beta"), (lambda: dr.MomentumCorrection(1), "momentum"), (lambda: dr.MomentumCorrection(-0.1), "momentum"),
])  # fmt: skip
def test_bad_parameters(make, says):
    with pytest.raises(dr.InvalidArgumentError, match=rf"{says}.*got"):
        make()


@pytest.mark.parametrize("sparsifier", [
    (1, 0, 0), (1, 0.1, 3), (1, 1.5, 0), (1, -0.5, 0), (1, np.nan, 0), (1, 0, np.nan), (1, 0, -3), (1, 0, 0.5), (2, 0, 0), (2, 2, 0),
    (3, -1, 0), (3, np.nan, 0), (3, 1e39, 0), (4, 0, 0), (4, 0.5, 0), (4, np.nan, 0), (4, 2.0**31, 0),
])  # fmt: skip
def test_the_native_core_refuses_bad_sparsifiers(sparsifier):
    fields = dr.Codec(dr.TopK(0.1)).fields(dr.Residual())
    fields[:3] = sparsifier
    residual = gradient(100, key=3)
    before = residual.copy()
    with pytest.raises(dr.InvalidArgumentError, match="expected.*got"):
        _native.encode(fields, gradient(100), 0, residual)
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("memory, parameter", [
    (dr.LowPass(0.5), 0), (dr.LowPass(0.5), 1.5), (dr.LowPass(0.5), np.nan), (dr.MomentumCorrection(), 1), (dr.MomentumCorrection(), -0.5),
])  # fmt: skip
def test_the_native_core_refuses_bad_memories(memory, parameter):
    fields = dr.Codec(dr.TopK(0.1)).fields(memory)
    fields[16] = parameter
    state = [gradient(100, key=3) for _ in memory.state]
    with pytest.raises(dr.InvalidArgumentError, match="expected.*got"):
        _native.encode(fields, gradient(100), 0, *state)
    for array in state:
        np.testing.assert_array_equal(array, gradient(100, key=3))


def test_the_native_core_refuses_an_unknown_sparsifier():
    fields = dr.Codec(dr.TopK(0.1)).fields(dr.NoMemory())
    fields[0] = 9
    with pytest.raises(dr.UnknownCodecError, match="sparsifier id: expected 0 to 4, got 9"):
        _native.encode(fields, gradient(100), 0)
