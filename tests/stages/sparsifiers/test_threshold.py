"""Test Threshold at its limit, and what it refuses."""

import numpy as np
import pytest
from native_and_numpy import selected, sent
from native_refusals import assert_core_refuses

import deepreduce_hvd as dr


def test_threshold_is_exclusive_and_zero_keeps_all_non_zeros():
    values = np.zeros(1000, dtype=np.float32)
    values[:6] = [0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(1)), -0.75, 1e-45, -0.0]
    np.testing.assert_array_equal(selected(sent(dr.Codec(dr.Threshold(0.5)), values)[0])[0], [2, 3])
    np.testing.assert_array_equal(
        selected(sent(dr.Codec(dr.Threshold(0)), values)[0])[0], [0, 1, 2, 3, 4]
    )
    assert selected(sent(dr.Codec(dr.Threshold(3e38)), values)[0])[0].size == 0


@pytest.mark.parametrize("threshold", [-1, np.nan, np.inf])
def test_bad_parameters(threshold):
    with pytest.raises(dr.InvalidArgumentError, match="at least 0.*got"):
        dr.Threshold(threshold)


@pytest.mark.parametrize("threshold", [-1, np.nan, 1e39])
def test_the_native_core_refuses_bad_parameters(threshold):
    assert_core_refuses(dr.Residual(), 0, [dr.Threshold.stage_id, threshold])
