"""Test how much memory a few bytes can request if the number of elements is not given."""

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd import _native

CODEC = dr.Codec(dr.NoneSparsifier(), index=dr.Rice())
MOST = 2**24


def payload_of(d, count=0):
    indices, values = np.arange(count, dtype=np.uint32), np.ones(count, np.float32)
    return CODEC.encode_sparse(indices, values, d)[0]


def kinds():
    yield "numpy", lambda array: array, np.asarray
    try:
        import torch

        yield "torch", torch.from_numpy, torch.Tensor.numpy
    except ImportError:
        pass
    try:
        import tensorflow as tf

        yield "tensorflow", tf.constant, lambda tensor: tensor.numpy()
    except ImportError:
        pass


KINDS = pytest.mark.parametrize(
    ("give", "take"), [pytest.param(give, take, id=name) for name, give, take in kinds()]
)


@pytest.mark.parametrize(
    ("size", "most"),
    [
        (0, MOST),
        (40, MOST),
        (4096, MOST),
        (4097, 4097 * 4096),
        (2**19, 2**31 - 1),
        (2**62, 2**31 - 1),
    ],
)
def test_the_default(size, most):
    assert _native.default_max_elements(size) == most


@KINDS
@pytest.mark.parametrize("d", [MOST + 1, 2**28, 2**31 - 1])
def test_a_few_bytes_do_not_ask_for_much(give, take, d):
    payload = payload_of(d)
    assert payload.size < 100
    with pytest.raises(dr.InvalidArgumentError) as refused:
        dr.decode(give(payload))
    assert str(refused.value) == (
        f"payload: expected at most max_elements = {MOST} elements, the default for "
        f"{payload.size} bytes "
        f"(pass a larger one for data that you trust), got {d}"
    )
    with pytest.raises(
        dr.InvalidArgumentError, match=f"at most max_elements = {d - 1} elements, got {d}"
    ):
        dr.decode(give(payload), max_elements=d - 1)


@KINDS
def test_what_bytes_have_earned_is_decoded(give, take):
    dense = take(dr.decode(give(payload_of(1000))))
    assert dense.shape == (1000,) and not dense.any()
    payload = payload_of(MOST + 1, 1500)
    assert payload.size > 4097
    assert take(dr.decode(give(payload))).sum() == 1500
    assert take(dr.decode(give(payload_of(MOST + 1)), max_elements=MOST + 1)).size == MOST + 1


@pytest.mark.parametrize("wrong", [-1, 1.5, "5", True, 2**63])
def test_max_elements_is_an_integer(wrong):
    with pytest.raises(
        dr.InvalidArgumentError, match=r"max_elements: expected an integer in \[0, 2\^63\), got"
    ):
        dr.decode(payload_of(5), max_elements=wrong)


def test_tensorflows_operator_when_it_takes_the_shape_from_the_payload():
    tf = pytest.importorskip("tensorflow")
    operators = pytest.importorskip("deepreduce_hvd.tensorflow.ops").operators

    def decode(payload, shape):
        return operators.deepreduce_decode_sum(
            payload, np.float64(1), shape, 1, [], [], [], [], variable="kernel", T=tf.float32
        )

    few = payload_of(2**28)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"parameter kernel: expected at most {MOST} elements of a payload of {few.size} "
        r"bytes where the "
        rf"shape is \[-1\], got {2**28}; give the shape of a payload that you trust",
    ):
        decode(few, [-1])
    assert decode(payload_of(1000), [-1]).shape == (1000,)
    assert decode(payload_of(MOST + 1, 1500), [-1]).shape == (MOST + 1,)
    assert decode(payload_of(MOST + 1), [MOST + 1]).shape == (MOST + 1,)
