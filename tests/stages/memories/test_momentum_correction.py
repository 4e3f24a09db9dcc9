"""Test that MomentumCorrection follows its formula, and sends what momentum SGD sums."""

import numpy as np
import pytest
from codecs_table import gradient
from native_and_numpy import largest, selected, sent
from native_refusals import assert_core_refuses

import deepreduce_hvd as dr


def test_momentum_correction_by_its_formula():
    v, u, g = gradient(3000, key=3), gradient(3000, key=4), gradient(3000)
    payload, (residual, velocity), _ = sent(
        dr.Codec(dr.TopK(0.1)), g, (v, u), dr.MomentumCorrection(0.9)
    )
    indices, values = selected(payload)
    expected_velocity = 0.9 * u.astype(np.float64) + g
    np.testing.assert_array_equal(indices, largest((v + expected_velocity.astype(np.float32)), 300))
    expected_residual = v + expected_velocity
    expected_residual[indices] -= values
    expected_velocity[indices] = 0
    np.testing.assert_allclose(residual, expected_residual, rtol=0, atol=1e-6)
    np.testing.assert_allclose(velocity, expected_velocity, rtol=0, atol=1e-6)
    assert (velocity[indices] == 0).all()


def test_momentum_correction_sends_what_momentum_sgd_sums():
    """Once all is sent, the sum is that of momentum SGD, restarted where elements were sent."""
    state = (np.zeros(50, dtype=np.float32), np.zeros(50, dtype=np.float32))
    total, velocity, expected = np.zeros(50), np.zeros(50), np.zeros(50)
    for step in range(6):
        values = gradient(50, key=60 + step)
        codec = dr.Codec(dr.NoneSparsifier() if step == 5 else dr.TopK(k=1))
        payload, state, _ = sent(codec, values, state, dr.MomentumCorrection(0.5), step=step)
        velocity = 0.5 * velocity + values
        expected += velocity
        total += dr.decode(np.frombuffer(payload, dtype=np.uint8))
        velocity[selected(payload)[0]] = 0
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
    assert not state[0].any() and not state[1].any()


@pytest.mark.parametrize("momentum", [1, -0.1])
def test_bad_parameters(momentum):
    with pytest.raises(dr.InvalidArgumentError, match="momentum.*got"):
        dr.MomentumCorrection(momentum)


@pytest.mark.parametrize("momentum", [1, -0.5])
def test_the_native_core_refuses_bad_parameters(momentum):
    assert_core_refuses(dr.MomentumCorrection(), 16, [momentum])
