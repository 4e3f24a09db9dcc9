"""Test what the binding of the native core refuses. Reading such arrays would end the process."""

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd import _native

FIELDS = dr.Codec(dr.TopK(0.5)).fields(dr.NoMemory())
WITH_RESIDUAL = dr.Codec(dr.TopK(0.5)).fields(dr.Residual())
PLACES, VALUES = np.arange(3, dtype=np.uint32), np.ones(3, dtype=np.float32)

#: what is no contiguous float32 array, and what a message says of it
NOT_FLOATS = [
    ("abc", "str"),
    (None, "NoneType"),
    (3, "int"),
    ([1.0, 2.0], "list"),
    (np.ones(4), r"float64 of shape \(4,\)"),
    (np.ones((4, 5), np.float32).T, r"float32 of shape \(5, 4\), not contiguous"),
]


@pytest.mark.parametrize("wrong,got", NOT_FLOATS)
@pytest.mark.parametrize(
    "name,call",
    [
        ("out", lambda wrong: _native.add_sparse(PLACES, VALUES, wrong)),
        ("out", lambda wrong: _native.decode_sum([], wrong)),
        ("out", lambda wrong: _native.decode_sum_of(
            np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64), wrong, 1.0
        )),
        ("residual", lambda wrong: _native.put_back([1.0, 0, 0, 0, 0], PLACES, VALUES, wrong)),
        ("values", lambda wrong: _native.encode_sparse(FIELDS, PLACES, wrong, 5)),
    ],
)  # fmt: skip
def test_arrays_that_are_updated_in_place(name, call, wrong, got):
    with pytest.raises(
        ValueError, match=f"{name}: expected a contiguous float32 array, got {got}$"
    ):
        call(wrong)


def test_sparse_values_are_as_many_as_indices():
    with pytest.raises(ValueError, match="values: expected as many as indices, 3, got 2"):
        _native.encode_sparse(FIELDS, PLACES, VALUES[:2].copy(), 5)


@pytest.mark.parametrize("function", [_native.encode, _native.select])
@pytest.mark.parametrize("array", [np.float32, np.float16, np.uint16, np.float64, np.uint8])
@pytest.mark.parametrize("dtype", [0, 1, 2, 3])
def test_dtypes_are_of_the_size_of_the_elements(function, array, dtype):
    gradient = np.ones(10, dtype=array)
    size = {0: 4, 1: 2, 2: 2, 3: 8}[dtype]
    if gradient.itemsize == size:
        function(FIELDS, gradient, dtype)
        return
    with pytest.raises(
        ValueError,
        match=f"gradient: expected elements of {size} bytes for dtype {dtype}, got {array.__name__}",
    ):
        function(FIELDS, gradient, dtype)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (np.ones(2, np.float32), "expected the gradient's number of elements, 3, got 2"),
        (np.ones(3), "expected a contiguous float32 array, got float64"),
    ],
)
def test_residuals_fit_the_gradient(wrong, message):
    with pytest.raises(ValueError, match=message):
        _native.encode(WITH_RESIDUAL, VALUES, 0, wrong)


def test_gradients_are_contiguous():
    with pytest.raises(ValueError, match="a contiguous array, got float32 of shape .2,., not cont"):
        _native.encode(FIELDS, np.ones(4, np.float32)[::2], 0)


@pytest.mark.parametrize(
    "memory,states,message",
    [
        (dr.NoMemory(), 1, "memory 0: expected no residual, got one"),
        (dr.Residual(), 0, "memory 1: expected a residual, got none"),
        (dr.Residual(), 2, "memory 1: expected no velocity, got one"),
        (dr.MomentumCorrection(), 1, "memory 3: expected a velocity, got none"),
    ],
)
def test_states_are_those_of_the_memory(memory, states, message):
    fields = dr.Codec(dr.TopK(0.5)).fields(memory)
    with pytest.raises(dr.InvalidArgumentError, match=message):
        _native.encode(fields, VALUES, 0, *(np.zeros(3, np.float32) for _ in range(states)))
