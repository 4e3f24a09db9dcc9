"""Test that TopK is exact for every input, hint and SIMD level."""

import numpy as np
import pytest
from codecs_table import SIZES, gradient
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays
from native_and_numpy import SIMD_LEVELS, largest, selected, sent
from native_refusals import assert_core_refuses
from sampling import parametrize_product

import deepreduce_hvd as dr

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


def test_warm_up_falls_exponentially():
    sparsifier = dr.TopK(0.01, warmup_steps=4, warmup_ratio=0.16)
    ratios = [sparsifier.parameters(step)[0] for step in range(6)]
    np.testing.assert_allclose(ratios, [0.16, 0.08, 0.04, 0.02, 0.01, 0.01], rtol=1e-12)
    for step in range(6):
        payload, _, _ = sent(dr.Codec(sparsifier), gradient(1000), step=step)
        assert selected(payload)[0].size == int(ratios[step] * 1000)


@pytest.mark.parametrize("ratio", [0.25, 0.3, 0.5, 1.0])
def test_a_warm_up_never_sends_less_than_the_steps_after_it(ratio):
    sparsifier = dr.TopK(ratio, warmup_steps=4)
    assert [sparsifier.parameters(step)[0] for step in range(6)] == [ratio] * 6
    assert eval(repr(sparsifier), vars(dr)) == sparsifier
    assert eval(repr(dr.TopK(ratio)), vars(dr)) == dr.TopK(ratio)


@pytest.mark.parametrize("make, says", [
    (lambda: dr.TopK(), "one of ratio and k"), (lambda: dr.TopK(0.1, k=3), "one of ratio and k"),
    (lambda: dr.TopK(0), "ratio"), (lambda: dr.TopK(1), "float in"),
    (lambda: dr.TopK(1.5), "ratio"), (lambda: dr.TopK(np.nan), "ratio"),
    (lambda: dr.TopK(k=0), "k"), (lambda: dr.TopK(k=1.5), "k"),
    (lambda: dr.TopK(k=2**31), "k"), (lambda: dr.TopK(k=3, warmup_steps=2), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=-1), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=1.5), "warmup_steps"),
    (lambda: dr.TopK(0.1, warmup_steps=2, warmup_ratio=0), "warmup_ratio"),
    (lambda: dr.TopK(0.1, warmup_ratio="0.5"), "warmup_ratio"),
    (lambda: dr.TopK(0.1, warmup_steps=2, warmup_ratio=0.05), "warmup_ratio: expected at least the ratio 0.1, "),
])  # fmt: skip
def test_bad_parameters(make, says):
    with pytest.raises(dr.InvalidArgumentError, match=rf"{says}.*got"):
        make()


@pytest.mark.parametrize(
    "ratio, k", [(0, 0), (0.1, 3), (1.5, 0), (-0.5, 0), (np.nan, 0), (0, np.nan), (0, -3), (0, 0.5)]
)
def test_the_native_core_refuses_bad_parameters(ratio, k):
    assert_core_refuses(dr.Residual(), 0, [dr.TopK.stage_id, ratio, k])
