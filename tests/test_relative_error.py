"""Test that value codecs whose error exceeds the values are refused together with a memory."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import deepreduce_hvd as dr

CODECS = [
    dr.QSGD(bits, bucket, norm)
    for bits in range(1, 9)
    for bucket in (16, 64, 512, 8192)
    for norm in ("max", "l2")
] + [dr.LloydMax(bits) for bits in range(1, 5)]


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_estimate_is_that_of_exponential_or_equal_magnitudes(codec):
    draw = np.random.default_rng(5)
    signs = draw.choice([-1, 1], 1 << 17)
    measured = []
    for magnitudes in (draw.exponential(size=1 << 17), np.ones(1 << 17)):
        values = (signs * magnitudes).astype(np.float32)
        decoded = codec.encode(values, key=7)[1].astype(np.float64)
        measured.append(np.linalg.norm(values - decoded) / np.linalg.norm(values))
    assert codec.relative_error() == pytest.approx(max(measured), rel=0.1)


def compressor(value, memory):
    parameter = torch.nn.Parameter(torch.zeros(2000))
    return dr.Compressor(
        dr.Codec(dr.TopK(0.01), value=value), memory, parameters=[("weight", parameter)]
    )


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_residuals_stay_bounded_or_the_codec_is_refused(codec):
    """Residual stays bounded over 60 steps of the same gradient, if the codec is accepted."""
    compressor(codec, dr.NoMemory())
    try:
        accepted = compressor(codec, dr.Residual())
    except dr.InvalidArgumentError as error:
        assert "error is smaller than the values" in str(error)
        assert codec.relative_error() >= 1
        return
    assert accepted.codec.value == codec
    draw = np.random.default_rng(8)
    gradient = draw.laplace(size=20000).astype(np.float32)
    residual = np.zeros_like(gradient)
    whole = dr.Codec(dr.TopK(0.1), dr.RawIndex(), codec)
    for step in range(60):
        whole.encode(gradient, residual=residual, step=step)
    exact = np.zeros_like(gradient)
    plain = dr.Codec(dr.TopK(0.1), dr.RawIndex(), dr.RawValue())
    for step in range(60):
        plain.encode(gradient, residual=exact, step=step)
    assert np.linalg.norm(residual) < 4 * np.linalg.norm(exact)


@pytest.mark.parametrize("memory", [dr.Residual(), dr.LowPass(), dr.MomentumCorrection()], ids=repr)
def test_those_that_diverged_are_refused_with_every_memory(memory):
    for codec in (dr.QSGD(1), dr.QSGD(2), dr.QSGD(4, norm="l2")):
        with pytest.raises(dr.InvalidArgumentError, match="more bits, a smaller bucket, or NoMem"):
            compressor(codec, memory)
    for codec in (dr.QSGD(3), dr.QSGD(4), dr.QSGD(8, norm="l2"), dr.Float16(), dr.LloydMax(1)):
        compressor(codec, memory)
