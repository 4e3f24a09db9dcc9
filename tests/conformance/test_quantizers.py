"""Test QSGD and Quantile against what their papers promise."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from native_and_numpy import both
from value_sections import ARRAYS, LARGEST, random_floats, section_and_decoded

import deepreduce_hvd as dr
from deepreduce_hvd.stages.value_codecs import quantile


def norms_of(values, bucket, norm):
    groups = [values[at : at + bucket].astype(np.float64) for at in range(0, values.size, bucket)]
    norms = [
        np.abs(group).max() if norm == "max" else np.sqrt((group**2).sum()) for group in groups
    ]
    return np.repeat(norms, [group.size for group in groups])


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_qsgd_is_unbiased(bits, norm):
    """For every value, the mean over many keys is the value, within the standard error."""
    values = gradient(200)
    codec = dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=bits, bucket=64, norm=norm))
    draws = 2000
    total = np.zeros(values.size)
    for step in range(draws):
        total += dr.decode(codec.encode(values, step=step))
    norms = norms_of(values, 64, norm)
    interval = 2 * norms if bits == 1 else norms / (2 ** (bits - 1) - 1)
    # a draw gives the lower or the upper end of its interval
    upper = (values + norms) / interval if bits == 1 else np.abs(values) / interval
    upper = upper - np.floor(upper)
    # rare events are not normally distributed
    error = interval * np.sqrt(np.maximum(upper * (1 - upper), 10 / draws) / draws)
    deviations = (total / draws - values) / error
    assert np.abs(deviations).max() < 4.5
    assert 0.3 < np.sqrt((deviations**2).mean()) < 1.3, (
        "the draws vary less or more than they should"
    )


@settings(max_examples=100, deadline=None)
@given(
    ARRAYS,
    strategies.integers(1, 8),
    strategies.sampled_from(["max", "l2"]),
    strategies.sampled_from([8, 64, 512]),
)
def test_qsgd_error_bound(values, bits, norm, bucket):
    """No value is off by more than one level. No sign changes, except with one bit."""
    _, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=bucket, norm=norm), values)
    assert np.isfinite(decoded).all()
    norms = np.minimum(norms_of(values, bucket, norm), LARGEST)
    interval = 2 * norms if bits == 1 else norms / (2 ** (bits - 1) - 1)
    # a few roundings to float32, and the spacing of subnormals
    assert (np.abs(decoded.astype(np.float64) - values) <= interval * (1 + 1e-5) + 1e-44).all()
    assert bits == 1 or (decoded * values.astype(np.float64) >= 0).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_qsgd_of_zeros(bits, norm):
    """A bucket with norm 0 decodes to zeros, not NaN."""
    values = gradient(48)
    values[16:32] = 0
    section, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=16, norm=norm), values)
    assert np.isfinite(decoded).all()
    assert not decoded[16:32].any()
    assert struct.unpack_from("<3f", section, 3)[1] == 0


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("scale", [LARGEST, np.float32(1e-45), np.float32(1e-38)])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_qsgd_of_extremes(bits, scale, norm):
    """Test the largest floats and subnormals, whose squares overflow and underflow float32."""
    values = np.where(np.arange(600) % 2, scale, -scale).astype(np.float32)
    _, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=512, norm=norm), values)
    assert np.isfinite(decoded).all()
    if norm == "max":
        np.testing.assert_array_equal(decoded, values)


def test_qsgd_size():
    """The size is `bits` per value and one norm per bucket, like the estimate for planning."""
    for bits in range(1, 9):
        value = dr.QSGD(bits=bits, bucket=512)
        section, _ = section_and_decoded(value, gradient(5120))
        assert (
            len(section) == 3 + 10 * 4 + 5120 * bits // 8 == 3 + 5120 * value.bits_per_value() / 8
        )


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
