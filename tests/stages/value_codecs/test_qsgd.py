"""Test QSGD against what its paper promises."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from value_sections import ARRAYS, LARGEST, section_and_decoded

import deepreduce_hvd as dr


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
