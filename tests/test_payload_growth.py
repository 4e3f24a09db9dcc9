"""Test the warnings about settings with which payloads or residuals grow from step to step."""

import warnings

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr


def named():
    return torch.nn.Linear(40, 50).named_parameters()


@pytest.fixture(autouse=True)
def initialized_horovod():
    import horovod.torch as hvd

    hvd.init()


def sent_per_step(codec, memory, steps=40):
    """Return the elements that are sent in each step of a table of which each step uses 30 rows."""
    draw, residual, sent = np.random.default_rng(0), np.zeros((1000, 8), np.float32), []
    for _ in range(steps):
        gradient = np.zeros_like(residual)
        gradient[draw.choice(1000, 30, replace=False)] = draw.standard_normal((30, 8))
        payload = codec.encode((gradient + residual).ravel())
        sent.append(dr.inspect(payload)["k"])
        if memory.state:
            residual = gradient + residual - dr.decode(payload).reshape(residual.shape)
    return sent


@pytest.mark.parametrize(
    "value", [dr.LloydMax(bits=4), dr.QSGD(bits=7), dr.Float16(), dr.FitPoly()]
)
def test_payloads_that_grow_have_a_warning(value):
    codec = dr.Codec(dr.Threshold(0), index=dr.RLE(), value=value)
    with pytest.warns(UserWarning, match="sent once is sent in every later step") as caught:
        dr.Compressor(codec, parameters=named())
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="payloads grow"):
        dr.Compressor({"weight": codec}, parameters=named())
    grown = sent_per_step(codec, dr.Residual())
    assert grown[-1] > 3 * grown[0]


@pytest.mark.parametrize(
    ("codec", "memory"),
    [
        (dr.Codec(dr.Threshold(0), value=dr.LloydMax(bits=4)), dr.NoMemory()),
        (dr.Codec(dr.Threshold(0), value=dr.RawValue()), dr.Residual()),
        (dr.Codec(dr.Threshold(0), value=dr.Deflate()), dr.Residual()),
    ],
)
def test_payloads_that_do_not_grow_have_none(codec, memory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dr.Compressor(codec, memory, parameters=named())
    assert max(sent_per_step(codec, memory)) <= 240


@pytest.mark.parametrize("sparsifier", [dr.Threshold(0.5), dr.TopK(0.01), dr.NoneSparsifier()])
def test_other_sparsifiers_have_no_warning_of_growth(sparsifier):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dr.Compressor(dr.Codec(sparsifier, value=dr.LloydMax(bits=4)), parameters=named())


def norm_after(policy, steps=60):
    """Return the norm of the residual after some steps, in units of a gradient's norm."""
    draw, residual = np.random.default_rng(0), np.zeros(5000, np.float32)
    codec = dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.05, policy=policy))
    for step in range(steps):
        gradient = draw.standard_normal(5000).astype(np.float32)
        codec.encode(gradient, residual, step=step)
    return float(np.linalg.norm(residual) / np.sqrt(5000))


def test_residuals_that_grow_have_a_warning():
    """The policy leftmost hardly ever sends the end of a tensor."""
    for policy in ("leftmost", "p0", "p2"):
        codec = dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.05, policy=policy))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dr.Compressor(codec, parameters=named())
            dr.Compressor(codec, dr.NoMemory(), parameters=named())
        texts = [str(one.message) for one in caught]
        assert len(texts) == (policy == "leftmost"), texts
        assert all("hardly ever sent" in text for text in texts)
    assert norm_after("leftmost") > 1.2 * norm_after("p2")
