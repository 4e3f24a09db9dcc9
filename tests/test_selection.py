"""Test that selection with error feedback is exact for every input, hint and SIMD level.

These cases are not in the conformance suite.
"""

import numpy as np
import pytest
from codecs_table import MEMORIES, SPARSIFIERS, gradient
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays
from native_and_numpy import SIMD_LEVELS, largest, selected, sent
from sampling import parametrize_product
from scipy.stats import chi2

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.stages.sparsifiers.random_k import permuted

#: sizes around the widths of vectors, the blocks of the passes and the memory for candidates
SIZES = (1, 7, 8, 9, 15, 16, 17, 31, 33, 2047, 2048, 2049, 4097, 16383, 16384, 16385, 20000)
HINTS = (0.0, -1.0, np.nan, np.inf, -np.inf, 1e-45, 1e-30, 1e-3, 0.1, 0.5, 1.0, 1e30, 3.4e38)


def assert_top_k(values, k, threshold=0.0, simd=-1):
    payload, _, after = sent(dr.Codec(dr.TopK(k=k)), values, threshold=threshold, simd=simd)
    expected = largest(values, k)
    indices, kept = selected(payload)
    if indices.size == values.size:  # sent uncompressed, with zeros
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
    """Return {name: (d,) float32} whose sample, hint or order predicts the k-th magnitude badly."""
    d = 100_000
    ascending = np.arange(1, d + 1, dtype=np.float32)
    last_block = np.full(d, 1e-3, dtype=np.float32)
    last_block[-1500:] = gradient(1500) + 2
    few = np.zeros(d, dtype=np.float32)
    few[::3001] = -7
    return {
        "all equal": np.full(d, -0.5, dtype=np.float32), "ascending": ascending,
        "descending": ascending[::-1].copy(),
        "large ones at the end": last_block, "fewer non-zeros than k": few,
        "zeros": np.zeros(d, dtype=np.float32),
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
    strategies.integers(1, 40), strategies.floats(width=32),
    strategies.sampled_from(list(SIMD_LEVELS)),
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
    """Every float16 and bfloat16 value converts as in NumPy, and float64 near float32's limits."""
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


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16, 17, 1000, 4096])
def test_random_permutation_is_one(d):
    np.testing.assert_array_equal(
        np.sort(permuted(99, d, np.arange(d, dtype=np.uint32))), np.arange(d)
    )


@pytest.mark.parametrize(
    "d, k",
    [
        (10, 3),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(33, 8, marks=pytest.mark.slow),
    ],
)
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
    assert np.intersect1d(ranks[0], other).size < 20  # 1 is expected
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
    (lambda: dr.TopK(), "one of ratio and k"), (lambda: dr.TopK(0.1, k=3), "one of ratio and k"),
    (lambda: dr.TopK(0), "ratio"),
    (lambda: dr.TopK(1), "float in"), (lambda: dr.RandomK(20), "float in"),
    (lambda: dr.TopK(1.5), "ratio"), (lambda: dr.TopK(np.nan), "ratio"),
    (lambda: dr.TopK(k=0), "k"), (lambda: dr.TopK(k=1.5), "k"),
    (lambda: dr.TopK(k=2**31), "k"), (lambda: dr.TopK(k=3, warmup_steps=2), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=-1), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=1.5), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=2, warmup_ratio=0), "warmup_ratio"),
    (lambda: dr.RandomK(), "one of ratio and k"), (lambda: dr.RandomK(-0.1), "ratio"),
    (lambda: dr.RandomK(k=np.inf), "k"),
    (lambda: dr.Threshold(-1), "at least 0"), (lambda: dr.Threshold(np.nan), "at least 0"),
    (lambda: dr.Threshold(np.inf), "at least 0"),
    (lambda: dr.ChunkTopK(), "one of ratio and chunk"), (lambda: dr.ChunkTopK(0), "ratio"),
    (lambda: dr.ChunkTopK(chunk=0), "chunk"),
    (lambda: dr.ChunkTopK(chunk=2.5), "chunk"), (lambda: dr.LowPass(0), "beta"),
    (lambda: dr.LowPass(1.1), "beta"),
    (lambda: dr.LowPass(np.nan), "beta"), (lambda: dr.MomentumCorrection(1), "momentum"),
    (lambda: dr.MomentumCorrection(-0.1), "momentum"),
])  # fmt: skip
def test_bad_parameters(make, says):
    with pytest.raises(dr.InvalidArgumentError, match=rf"{says}.*got"):
        make()


@pytest.mark.parametrize("sparsifier", [
    (1, 0, 0), (1, 0.1, 3), (1, 1.5, 0), (1, -0.5, 0), (1, np.nan, 0), (1, 0, np.nan), (1, 0, -3),
    (1, 0, 0.5), (2, 0, 0), (2, 2, 0),
    (3, -1, 0), (3, np.nan, 0), (3, 1e39, 0), (4, 0, 0), (4, 0.5, 0), (4, np.nan, 0),
    (4, 2.0**31, 0),
])  # fmt: skip
def test_the_native_core_refuses_bad_sparsifiers(sparsifier):
    fields = dr.Codec(dr.TopK(0.1)).fields(dr.Residual())
    fields[:3] = sparsifier
    residual = gradient(100, key=3)
    before = residual.copy()
    with pytest.raises(dr.InvalidArgumentError, match="expected.*got"):
        _native.encode(fields, gradient(100), 0, residual)
    np.testing.assert_array_equal(residual, before)


def test_the_native_core_refuses_an_unknown_sparsifier():
    fields = dr.Codec(dr.TopK(0.1)).fields(dr.NoMemory())
    fields[0] = 9
    with pytest.raises(dr.UnknownCodecError, match="sparsifier id: expected 0 to 4, got 9"):
        _native.encode(fields, gradient(100), 0)
