"""Errors that one rank meets, or all do, on TensorFlow: the job must end with a message on every
rank. Started under horovodrun.
"""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow_tools import (
    batch,
    compressor_of,
    local_gradients,
    loss_of,
    make_step,
    model,
    variables,
)

import deepreduce_hvd as dr


@dr.register
class FailsOnRank1(dr.RawValue):
    stage_id = 201

    def encode(self, values, key):
        if hvd.rank() == 1:
            raise dr.InvalidArgumentError("values: expected good ones, got others")
        return super().encode(values, key)


def a_codec_fails_on_one_rank():
    named = model()
    tf.function(
        make_step(named, compressor_of(named, dr.Codec(dr.TopK(0.1), value=FailsOnRank1())))
    )(batch(0))


def slices_out_of_range_on_one_rank():
    table = tf.Variable(tf.ones([1000, 16]))
    compressor = dr.Compressor(parameters=[("table", table)])
    rows = tf.constant([1000 if hvd.rank() == 1 else 3])
    slices = tf.IndexedSlices(tf.ones([1, 16]), rows, dense_shape=tf.constant([1000, 16]))
    reduce = tf.function(
        lambda: dr.tensorflow.allreduce_gradients([slices], [table], compression=compressor)
    )
    reduce()


def other_codec_on_one_rank():
    named = model()
    make_step(named, compressor_of(named, dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05))))(
        batch(0)
    )


def other_process_set():
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    named = model()
    make_step(named, compressor_of(named, process_set=alone[hvd.rank()]))(batch(0))


def min_as_the_operation():
    named = model()
    compressor = compressor_of(named)
    with tf.GradientTape() as tape:
        loss = loss_of(named, batch(0))
    for gradient in tape.gradient(loss, variables(named)):
        hvd.allreduce(gradient, op=hvd.Min, compression=compressor)


def adasum():
    named = model()
    compressor = compressor_of(named)
    # the optimizer of tf.compat.v1 for Adasum never calls its compression
    for gradient in local_gradients(named, batch(0)):
        hvd.allreduce(gradient, compression=compressor, op=hvd.Adasum)


def xla():
    named = model()
    tf.function(make_step(named, compressor_of(named)), jit_compile=True)(batch(0))


def unnamed_gradient():
    named = model()
    make_step(named, compressor_of(named[:4]))(batch(0))


def unknown_shape():
    a, b = tf.Variable(tf.ones([100, 16])), tf.Variable(tf.ones([50, 16]))
    compressor = dr.Compressor(parameters=[("a", a), ("b", b)])
    reduce = tf.function(
        lambda gradient: hvd.allreduce(gradient, compression=compressor),
        input_signature=[tf.TensorSpec([None, 16])],
    )
    reduce(tf.ones([100, 16]))


if __name__ == "__main__":
    hvd.init()
    globals()[sys.argv[1]]()
    print("went on silently")
