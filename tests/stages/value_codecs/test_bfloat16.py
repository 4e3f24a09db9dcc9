"""Test BFloat16 against torch.bfloat16."""

import half_floats
import numpy as np
import pytest

import deepreduce_hvd as dr

VALUE = dr.BFloat16()


def to_float32(halves):
    """Return the values of uint16 patterns."""
    torch = pytest.importorskip("torch")
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy()


def rounded(values):
    """Round to nearest even, saturated; return float32."""
    torch = pytest.importorskip("torch")
    largest = float(np.uint32(0x7F7F0000).view(np.float32))
    # torch rounds values above the largest to infinity
    return np.clip(torch.from_numpy(values).to(torch.bfloat16).float().numpy(), -largest, largest)


def test_every_pattern():
    half_floats.check_every_pattern(VALUE, to_float32)


def test_every_tie_rounds_to_even():
    half_floats.check_every_tie(VALUE, to_float32, rounded, infinity=0x7F80)


def test_any_float():
    half_floats.check_any_float(VALUE, rounded)


def test_large_values_saturate():
    half_floats.check_saturation(VALUE, 3.3895313892515355e38)


def test_rounding_stays_in_the_residual():
    half_floats.check_residual(VALUE)
