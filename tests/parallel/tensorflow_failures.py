"""Raise errors on one rank, or on all, with TensorFlow.

The job must end with a message on every rank. Started under horovodrun.
"""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow_tools import batch, compressor_of, make_step, model

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


if __name__ == "__main__":
    hvd.init()
    globals()[sys.argv[1]]()
    print("went on silently")
