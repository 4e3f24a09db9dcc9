"""Test that LowPass follows its formula."""

import numpy as np
import pytest
from codecs_table import gradient
from native_and_numpy import sent
from native_refusals import assert_core_refuses

import deepreduce_hvd as dr


def test_low_pass_by_its_formula():
    m, g = gradient(3000, key=3), gradient(3000)
    payload, (after,), _ = sent(dr.Codec(dr.TopK(0.1)), g, (m,), dr.LowPass(0.3))
    s = dr.decode(np.frombuffer(payload, dtype=np.uint8)).astype(np.float64)
    np.testing.assert_allclose(
        after, 0.7 * m + 0.3 * (m.astype(np.float64) + g - s), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_nothing_is_lost(beta):
    """The residual is beta times the gradients that were not sent yet."""
    residual, missing = np.zeros(3000, np.float32), np.zeros(3000)
    codec = dr.Codec(dr.TopK(0.1), dr.Rice(), dr.LloydMax(bits=1))
    for key in range(30):
        g = gradient(3000, key=key)
        payload = codec.encode(g, residual, memory=dr.LowPass(beta))
        missing += g.astype(np.float64) - dr.decode(payload)
    np.testing.assert_allclose(residual, beta * missing, rtol=0, atol=1e-4)


def test_low_pass_of_one_is_the_residual():
    m, g = gradient(3000, key=3), gradient(3000)
    low_pass, residual = (
        sent(dr.Codec(dr.TopK(0.1)), g, (m,), memory) for memory in (dr.LowPass(1), dr.Residual())
    )
    assert low_pass[0] == residual[0]
    np.testing.assert_array_equal(low_pass[1], residual[1])


@pytest.mark.parametrize("beta", [0, 1.1, np.nan])
def test_bad_parameters(beta):
    with pytest.raises(dr.InvalidArgumentError, match="beta.*got"):
        dr.LowPass(beta)


@pytest.mark.parametrize("beta", [0, 1.5, np.nan])
def test_the_native_core_refuses_bad_parameters(beta):
    assert_core_refuses(dr.LowPass(0.5), 16, [beta])
