"""Test Quantile against what its paper promises."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from native_and_numpy import both
from value_sections import ARRAYS, random_floats, section_and_decoded

import deepreduce_hvd as dr
from deepreduce_hvd.stages.value_codecs import quantile


def sides_of(values, wanted):
    """Return [(sorted values, number of buckets)] for the negative and for the other values."""
    sides = [np.sort(values[values < 0]), np.sort(values[values >= 0])]
    buckets = quantile._buckets_of_sides(values.size, sides[0].size, wanted)
    return [(side, n) for side, n in zip(sides, buckets) if n]


@pytest.mark.parametrize("case", ["both", "positive", "negative", "lopsided", "normal"])
@pytest.mark.parametrize("buckets", [2, 3, 16, 256])
def test_means_lie_within_their_quantiles(buckets, case):
    values = {
        "both": gradient(5000),
        "positive": np.abs(gradient(5000)),
        "negative": -np.abs(gradient(5000)),
        "lopsided": np.where(np.arange(5000) == 17, np.float32(-1), np.abs(gradient(5000))),
        "normal": np.random.default_rng(2).standard_normal(5000).astype(np.float32),
    }[case]
    section, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
    negatives, others = struct.unpack_from("<HH", section)
    assert max(negatives, 1) + max(others, 1) >= 2 and negatives + others <= buckets
    means = np.frombuffer(section, dtype="<f4", count=negatives + others, offset=5)
    assert np.isin(decoded, means).all()
    at = 0
    for side, n in sides_of(values, buckets):
        levels = np.arange(n + 1) / n
        low = np.quantile(side, levels[:-1], method="lower")
        high = np.quantile(side, levels[1:], method="higher")
        assert (low <= means[at : at + n]).all() and (means[at : at + n] <= high).all()
        at += n
    assert at == means.size
    assert abs((decoded.astype(np.float64) - values).sum()) < 1e-6 * np.abs(values).sum(), (
        "buckets keep their sums"
    )


@settings(max_examples=150, deadline=None)
@given(ARRAYS, strategies.integers(2, 256))
def test_quantile_of_any_floats(values, buckets):
    """Decoded values are finite, with the same sign and in the same order as the values."""
    _, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
    assert np.isfinite(decoded).all()
    assert (decoded[values < 0] <= 0).all() and (decoded[values > 0] >= 0).all()
    assert (np.diff(decoded[np.argsort(values, kind="stable")]) >= 0).all()


def test_quantile_sorts_like_numpy():
    """Ranks equal those of a stable sort, with ties across buckets. Both zeros are positive."""
    for values in (
        random_floats(20_000),
        np.round(gradient(20_000) * 4).astype(np.float32),
        np.where(np.arange(3000) % 2, np.float32(-0.0), np.float32(0)),
        np.where(np.arange(3000) % 3, np.float32(-0.0), gradient(3000)),
        np.full(3000, -0.0, dtype=np.float32),
    ):
        for buckets in (2, 7, 256):
            section, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
            assert section is not None
            assert ((decoded < 0) <= (values < 0)).all() and ((decoded > 0) <= (values >= 0)).all()


@pytest.mark.parametrize(
    "values",
    [
        [3.5],
        [-3.5],
        [1, -1],
        [0.25] * 1000,
        [-0.25] * 999,
        [0.25] * 500 + [-4] * 500,
        [0, 0, 0, -1],
    ],
)
def test_few_distinct_values_are_exact(values):
    section, decoded = section_and_decoded(dr.Quantile(), values)
    np.testing.assert_array_equal(decoded, np.asarray(values, dtype=np.float32))
    assert section is not None or len(values) < 8


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8193])
def test_quantile_huffman_block_boundaries(count):
    """With one bucket for few negative values and one for the rest, the Huffman code is shorter."""
    values = np.where(np.arange(count) % 500 == 0, np.float32(-1), np.abs(gradient(count)))
    section, decoded = section_and_decoded(dr.Quantile(buckets=6), values)
    assert section[4] == 1, "expected Huffman coded buckets"
    assert ((decoded < 0) == (values < 0)).all()


def test_sketchml_instance():
    """SKCompress, with Huffman-coded index gaps and quantile buckets, keeps indices lossless."""
    values = gradient(1_000_000)
    codec = dr.Codec(dr.TopK(0.01), index=dr.Huffman(delta=True), value=dr.Quantile())
    residual = np.zeros_like(values)
    data, (residual,) = both(codec, dr.Residual(), values, (residual,))
    indices, decoded = dr.decode_sum_sparse([data], values.size)
    np.testing.assert_array_equal(indices, dr.TopK(0.01).select(values, key=0))
    selected = values[indices]
    assert np.linalg.norm(decoded - selected) < 0.005 * np.linalg.norm(selected)
    np.testing.assert_allclose(dr.decode(data) + residual, values, rtol=0, atol=1e-7)
    # 8 bits for the bucket, 10 for the gap, and two tables
    assert data.size * 8 / indices.size < 20
