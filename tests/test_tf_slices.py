"""Test the TensorFlow operators for slices (``tf.IndexedSlices``)."""

import os

import numpy as np
import pytest
from codecs_table import INDEX, VALUE

import deepreduce_hvd as dr

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
tensorflow_adapter = pytest.importorskip("deepreduce_hvd.tensorflow.ops")

DTYPES = ("float32", "float16", "bfloat16", "float64")


def slices(rows, values, *, residual=None, step=0, index=None, value=None, shape=(50, 4)):
    codec = dr.Codec(dr.NoneSparsifier(), index=index, value=value)
    memory = dr.NoMemory() if residual is None else dr.Residual()
    return tensorflow_adapter.operators.deepreduce_encode_slices(
        values,
        rows,
        np.array([codec.fields(memory)]),
        [0, step, 0, 0],
        [] if residual is None else [residual.handle],
        [],
        rows=shape[0],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_one_row_are_added_up(dtype):
    rows = tf.constant([9, 3, 9, 0, 9], tf.int64)
    values = tf.cast(np.random.default_rng(0).standard_normal((5, 4)), dtype)
    payload = slices(rows, values, index=dr.Rice())
    dense = np.zeros((50, 4), np.float32)
    for row, one in zip(rows.numpy(), tf.cast(values, tf.float32).numpy()):
        dense[row] += one
    np.testing.assert_array_equal(dr.decode(payload).numpy(), dense.reshape(-1))
    assert dr.inspect(payload)["k"] == 12 and dr.inspect(payload)["dtype"] == dtype


@pytest.mark.parametrize("index", ["rice", "bloom_p0", "bloom_p2", "elias_fano", "bitmap"])
@pytest.mark.parametrize("value", ["raw_value", "qsgd_4", "fit_poly", "quantile"])
def test_the_residual_of_slices_keeps_what_the_payload_lacks(index, value):
    random = np.random.default_rng(1)
    residual = tf.Variable(tf.zeros([50 * 4]))
    came_in, arrived = np.zeros(200), np.zeros(200)
    for step in range(4):
        rows = tf.constant(random.integers(0, 50, 8), tf.int64)
        values = random.standard_normal((8, 4)).astype(np.float32)
        payload = slices(
            rows,
            tf.constant(values),
            residual=residual,
            step=step,
            index=INDEX[index],
            value=VALUE[value],
        )
        np.add.at(came_in.reshape(50, 4), rows.numpy(), values)
        arrived += dr.decode(payload).numpy()
        np.testing.assert_allclose(arrived + residual.numpy(), came_in, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_that_cancel_the_residual_leave_nothing_behind(dtype):
    residual = tf.Variable(np.repeat(np.float32([0.5, 0.25]), 100))
    values = tf.cast(tf.constant([[-0.25, -0.5, 0, 1.5], [-0.25, 0, 0, 0]]), dtype)  # of one row
    payload = slices(tf.constant([3, 3], tf.int64), values, residual=residual)
    assert (
        dr.decode(payload).numpy()[12:16].tolist() == [0, 0, 0.5, 2]
        and dr.inspect(payload)["k"] == 2
    )
    expected = np.repeat(np.float32([0.5, 0.25]), 100)
    expected[12:16] = 0
    np.testing.assert_array_equal(residual.numpy(), expected)
    # a void step changes nothing
    residual.assign(np.repeat(np.float32([0.5, 0.25]), 100))
    slices(tf.constant([3], tf.int64), tf.cast([[-0.5, np.nan, 0, 0]], dtype), residual=residual)
    np.testing.assert_array_equal(residual.numpy(), np.repeat(np.float32([0.5, 0.25]), 100))


def test_denormal_slices_are_not_lost_in_a_graph():
    """TensorFlow's threads flush denormal numbers, which slices and residual keep."""
    random = np.random.default_rng(4)
    for _ in range(10):
        start = random.integers(-3, 4, 200).astype(np.float32) * np.float32(1e-40)
        residual, rows = tf.Variable(start), random.integers(0, 50, 20)
        values = random.integers(-3, 4, (20, 4)).astype(np.float32) * np.float32(1e-40)
        encode = tf.function(
            lambda rows, values, residual=residual: slices(rows, values, residual=residual)
        )
        payload = encode(tf.constant(rows), tf.constant(values)).numpy()
        expected = start.reshape(50, 4).copy()
        np.add.at(expected, rows, values)
        np.testing.assert_array_equal(dr.decode(payload) + residual.numpy(), expected.reshape(-1))


def test_slices_edge_cases():
    residual = tf.Variable(tf.ones([200]))
    nothing = slices(tf.zeros([0], tf.int64), tf.zeros([0, 4]), residual=residual)
    assert not dr.decode(nothing).numpy().any() and (residual.numpy() == 1).all()
    slices(tf.constant([5], tf.int64), tf.constant([[1.0, np.nan, 0, 0]]), residual=residual)
    assert (residual.numpy() == 1).all(), "a non-finite step changed the residual"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_void_step_of_slices_is_one_slice_of_nan(dtype):
    operators = tensorflow_adapter.operators
    payload = slices(tf.constant([5], tf.int64), tf.constant([[1.0, np.nan, 0, 0]]))
    values, rows = operators.deepreduce_decode_slices(
        payload,
        np.float64(1),
        1,
        tf.Variable(np.zeros(2)).handle,
        T=dtype,
        shape=[50, 4],
        variable="kernel",
    )
    assert values.shape == (1, 4) and rows.numpy().tolist() == [0]
    assert np.isnan(tf.cast(values, tf.float32).numpy()).all()
