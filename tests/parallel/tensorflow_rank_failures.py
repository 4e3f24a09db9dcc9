"""Train with TensorFlow until one rank hangs, is killed or raises an error.

Started as one rank of a job.
"""

import signal
import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from rank_failures import STEP, meet

import deepreduce_hvd as dr


def main(failure, communicator):
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    weight = tf.Variable(tf.ones([40, 30]), name="weight")
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.05)), communicator=communicator, parameters=[weight], dense_below=0
    )

    @tf.function
    def train_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.random.normal([8, 40]) @ weight)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        weight.assign_sub(1e-3 * tape.gradient(loss, [weight])[0])

    step = 0
    while True:
        if last and step == STEP:
            meet(failure)
        train_step()
        step += 1


if __name__ == "__main__":
    signal.alarm(120)  # ends this process even if the test is killed
    main(sys.argv[1], {"allgather": dr.Allgather(), "rounds": dr.GTopK()}[sys.argv[2]])
