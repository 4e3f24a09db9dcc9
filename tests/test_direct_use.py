"""Test Codec.encode and decode_sum with arguments that would give wrong sums or never return."""

import numpy as np
import pytest

import deepreduce_hvd as dr

CODEC = dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.LloydMax(bits=1))
KINDS = ("numpy", "torch", "tensorflow")


def gradient_and_state(kind, state):
    ones = np.ones(state.size, np.float32)
    if kind == "numpy":
        return ones, state.copy()
    if kind == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(ones), torch.from_numpy(state.copy())
    tf = pytest.importorskip("tensorflow")
    return tf.constant(ones), tf.Variable(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_residual_of_finite_numbers(kind, bad):
    random = np.random.default_rng()
    state = random.standard_normal(500).astype(np.float32)
    state[random.integers(500)] = bad
    gradient, residual = gradient_and_state(kind, state)
    with pytest.raises(dr.InvalidArgumentError, match="residual: expected finite numbers, got NaN"):
        CODEC.encode(gradient, residual)
    np.testing.assert_array_equal(np.asarray(residual), state)


def test_the_same_variable_twice():
    """TensorFlow's operator would wait for itself."""
    gradient, residual = gradient_and_state("tensorflow", np.zeros(500, np.float32))
    with pytest.raises(dr.InvalidArgumentError, match="residual, velocity: expected a variable fo"):
        CODEC.encode(gradient, (residual, residual), memory=dr.MomentumCorrection(0.9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_in_place_of_a_list(kind):
    gradient, out = gradient_and_state(kind, np.zeros(500, np.float32))
    with pytest.raises(dr.InvalidArgumentError, match=r"expected a list .* write \[payload\]"):
        dr.decode_sum(CODEC.encode(gradient), out)


def test_payloads_as_the_rows_of_an_array():
    payload = CODEC.encode(np.ones(500, np.float32))
    two = dr.decode_sum(np.stack([payload, payload]), np.zeros(500, np.float32))
    np.testing.assert_array_equal(two, 2 * dr.decode(payload))
