"""Test that a job of one process compresses nothing on TensorFlow."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import deepreduce_hvd as dr
from deepreduce_hvd.tensorflow import allreduce_gradients

GRADIENT = tf.random.stateless_normal([60, 40], [1, 2])


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def reduce_slices(*arguments):
    """Return the slices of rows 7, 2 and again 7, reduced."""
    variable = tf.Variable(tf.zeros([60, 40]), name="table")
    compressor = dr.Compressor(*arguments, parameters=[variable])
    slices = tf.IndexedSlices(GRADIENT[:3], [7, 2, 7], [60, 40])
    (reduced,) = allreduce_gradients([slices], [variable], compressor, op=hvd.Sum)
    assert compressor.stats()["table:0"]["path"] == "none"
    return reduced


@pytest.mark.parametrize("wrap", [lambda call: call, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("codec", [dr.Codec(dr.TopK(0.01)), "fp16", "dense"])
def test_gradients_stay_as_they_are(codec, wrap):
    variable = tf.Variable(tf.zeros([60, 40]), name="table")
    compressor = dr.Compressor(codec, parameters=[variable])
    reduce = wrap(
        lambda gradient: allreduce_gradients([gradient, None], [variable] * 2, compressor)
    )
    reduced, nothing = reduce(GRADIENT)
    np.testing.assert_array_equal(reduced.numpy(), GRADIENT.numpy())
    assert nothing is None
    (row,) = compressor.stats().values()
    assert (row["path"], row["steps"], row["sent_bytes"]) == ("none", 0, 0)
    assert not any(kept.any() for kept in state_of(compressor))


def state_of(compressor):
    (state,) = compressor.state_dict()["parameters"].values()
    return state["memory"].values()


def test_slices_of_the_same_row_are_added_up():
    """Their rows are distinct and ascending, as with several processes."""
    reduced = reduce_slices(dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=4)))
    np.testing.assert_array_equal(reduced.indices.numpy(), [2, 7])
    np.testing.assert_array_equal(reduced.dense_shape.numpy(), [60, 40])
    expected = np.stack([GRADIENT[1], GRADIENT[0] + GRADIENT[2]])
    np.testing.assert_array_equal(reduced.values.numpy(), expected)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("codec", [dr.Codec(dr.TopK(0.01)), "fp16"])
@pytest.mark.parametrize(
    ("width", "whole", "got"),
    [
        (30, None, r"values of shape \(3, 30\)"),
        (30, [60, 30], r"values of shape \(3, 30\)"),
        (40, [50, 40], r"a tensor of shape \(50, 40\)"),
    ],
)
def test_slices_of_another_shape_than_their_variable(width, whole, got, codec, in_graph):
    variable = tf.Variable(tf.zeros([60, 40]), name="kernel")
    compressor = dr.Compressor(codec, parameters=[variable], dense_below=0)

    def reduce(values):
        shape = None if whole is None else tf.constant(whole)
        slices = tf.IndexedSlices(values, tf.constant([7, 2, 7]), shape)
        return allreduce_gradients([slices], [variable], compressor)

    reduce = tf.function(reduce) if in_graph else reduce
    expected = r"expected the gradient of kernel:0, of shape \(60, 40\), got slices "
    with pytest.raises(Exception, match=rf"{expected}\w+ {got}"):
        reduce(tf.zeros([3, width]))


def test_slices_of_a_variable_that_is_not_compressed_become_a_tensor():
    reduced = reduce_slices("fp16")
    assert tf.is_tensor(reduced)
    np.testing.assert_array_equal(reduced[7].numpy(), (GRADIENT[0] + GRADIENT[2]).numpy())


def test_what_several_processes_refuse_is_refused():
    compressor = dr.Compressor(parameters=[tf.Variable(tf.zeros([60, 40]), name="table")])
    with pytest.raises(dr.InvalidArgumentError, match="expected variables that the compressor was"):
        allreduce_gradients([GRADIENT], [tf.Variable(GRADIENT, name="other")], compressor)
    with pytest.raises(dr.InvalidArgumentError, match="NoMemory or Residual for slices"):
        reduce_slices(dr.Codec(dr.TopK(0.01)), dr.MomentumCorrection(0.9))
    # AutoGraph raises its own type, with our text
    with pytest.raises(Exception, match="expected a function without XLA"):
        tf.function(reduce_slices, jit_compile=True)(dr.Codec(dr.TopK(0.01)))


def test_a_single_variable_is_not_taken_for_a_list_of_its_rows():
    variable = tf.Variable(tf.zeros([60, 40]), name="table")
    compressor = dr.Compressor(parameters=[variable])
    with pytest.raises(dr.InvalidArgumentError, match=r"^bound_to: .* write \[variable\]$"):
        compressor.bound_to(variable)
    for arguments, expected in (
        ((GRADIENT, [variable]), r"a list of gradients, got one EagerTensor; write \[gradient\]"),
        (([GRADIENT], variable), r"a list of variables, got one ResourceVariable; write"),
        (([GRADIENT] * 2, [variable]), "for each of the 1 variables, got 2"),
    ):
        with pytest.raises(dr.InvalidArgumentError, match=f"allreduce_gradients: .*{expected}"):
            allreduce_gradients(*arguments, compressor)


def test_what_is_not_a_compressor_is_refused():
    variable = tf.Variable(tf.zeros([60, 40]), name="table")
    with pytest.raises(dr.InvalidArgumentError, match="Compressor, got the class NoneCompressor"):
        allreduce_gradients([GRADIENT], [variable], hvd.Compression.none)
