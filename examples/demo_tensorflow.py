"""Train a small Keras network on Fashion-MNIST with ``horovodrun -np 2`` and DeepReduce.

``make demo-tf`` runs this script, which also trains without DeepReduce. It prints a table and
writes results/demo-tf.json and results/demo-tf.png.
"""

import os
import sys

from rows import compare, main


def worker(options):
    """Run the demo on one rank."""
    # Horovod's DistributedOptimizer wraps the optimizers of tf-keras
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    import fashion_tensorflow

    hvd.init()

    def mean(number):
        return float(hvd.allreduce(tf.constant(number, tf.float64), name="mean", op=hvd.Average))

    compare(options, hvd, fashion_tensorflow, lambda network: network.trainable_variables, mean)


if __name__ == "__main__":
    sys.exit(main(__doc__, __file__, worker, "demo-tf.json", seconds_per_row=60))
