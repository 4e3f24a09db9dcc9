"""Test Float16 against NumPy's float16."""

import half_floats
import numpy as np
from native_and_numpy import both
from value_sections import assert_same_bits

import deepreduce_hvd as dr

VALUE = dr.Float16()


def to_float32(halves):
    """Return the values of uint16 patterns."""
    return halves.view(np.float16).astype(np.float32)


def rounded(values):
    """Round to nearest even, saturated; return float32."""
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def test_every_pattern():
    half_floats.check_every_pattern(VALUE, to_float32)


def test_every_tie_rounds_to_even():
    half_floats.check_every_tie(VALUE, to_float32, rounded, infinity=0x7C00)


def test_any_float():
    half_floats.check_any_float(VALUE, rounded)


def test_large_values_saturate():
    half_floats.check_saturation(VALUE, 65504.0)


def test_rounding_stays_in_the_residual():
    half_floats.check_residual(VALUE)


def test_every_half_as_a_gradient():
    """float16 gradients widen exactly, subnormals included; NaN and Inf void the step."""
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    codec = dr.Codec(dr.NoneSparsifier())
    finite = halves[np.isfinite(halves)]
    data, _ = both(codec, dr.NoMemory(), finite, ())
    assert_same_bits(dr.decode_sum_sparse([data], finite.size)[1], finite.astype(np.float32))
    for bad in halves[~np.isfinite(halves)][::97]:
        assert np.isnan(dr.decode(codec.encode(np.array([1, bad], dtype=np.float16)))).all()
