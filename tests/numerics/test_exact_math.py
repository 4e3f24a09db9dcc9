"""Test the quotient, the exponential and the sum that are the same on every machine."""

import numpy as np
import pytest

from deepreduce_hvd.numerics import exact_math


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 1000, 65521, 2**24])
def test_quotients_are_those_of_a_thread_that_keeps_denormal_numbers(divisor, flushes):
    flush = pytest.importorskip("torch").set_flush_denormal
    if not flush(False):
        pytest.skip("this processor cannot flush denormal numbers")
    random = np.random.default_rng(divisor)
    bits = random.integers(0, 0x7F800000, 100000).astype(np.uint32)
    bits[::2] >>= random.integers(0, 32, 50000).astype(np.uint32)
    ends = np.array([2.0**-126, divisor * 2.0**-126, divisor * 2.0**-125], dtype=np.float32)
    ends = np.concatenate([ends.view(np.uint32) + np.uint32(step) for step in (2**32 - 1, 0, 1)])
    values = np.concatenate([bits, ends, np.arange(5000, dtype=np.uint32)]).view(np.float32)
    values = np.concatenate([values, -values])
    expected = values / np.float32(divisor)
    flush(flushes)
    try:
        got = exact_math.divided(values, divisor)
    finally:
        flush(False)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


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
