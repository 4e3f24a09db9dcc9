"""Test the exponential and the sum that are the same on every machine."""

import numpy as np
import pytest

from deepreduce_hvd.numerics import exact_math


def test_exp_is_accurate():
    x = np.concatenate(
        [np.random.default_rng(1).uniform(-700, 700, 100000), [0.0, -0.0, 1e-300, 0.5 * np.log(2)]]
    )
    np.testing.assert_allclose(exact_math.exp(x), np.exp(x), rtol=4e-16)


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (9,), (100003,), (6, 4099)])
def test_lane_sum_is_sequential_in_each_lane(shape):
    """NumPy does not document the order of a sum over an outer axis. This checks it."""
    terms = np.random.default_rng(2).standard_normal(shape) * 10.0 ** np.random.default_rng(
        3
    ).integers(-8, 8, shape)
    rows = np.zeros((*shape[:-1], -(-shape[-1] // 8) * 8))
    rows[..., : shape[-1]] = terms
    rows = rows.reshape(*shape[:-1], -1, 8)
    lanes = np.zeros((*shape[:-1], 8))
    for row in np.moveaxis(rows, -2, 0):
        lanes = lanes + row
    a, b, c, d, e, f, g, h = np.moveaxis(lanes, -1, 0)
    np.testing.assert_array_equal(
        exact_math.lane_sum(terms), ((a + e) + (c + g)) + ((b + f) + (d + h))
    )
