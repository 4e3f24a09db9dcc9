"""The main job in Keras: a small network on Fashion-MNIST under ``horovodrun -np 2``, with and without DeepReduce.

``make demo-tf`` runs this. It prints a table and leaves results/demo-tf.json and results/demo-tf.png.
"""

import os
import sys

from rows import Trained, compare, parse, present


def worker(options):
    """What every rank runs."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Horovod's DistributedOptimizer wraps the optimizers of tf-keras
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from fashion_tensorflow import dense_bytes, load, train

    import deepreduce_hvd as dr

    hvd.init()
    data = load()

    def train_row(name, codec, seed, watch):
        def compression(network):
            if codec is None:
                return getattr(hvd.Compression, name)
            watch.compressor = dr.Compressor(codec, parameters=network.trainable_variables)
            return watch.compressor

        network, seconds, accuracy = train(data, compression, options.epochs, seed, watch, options.learning_rate)
        return Trained(accuracy, seconds, dense_bytes(network))

    compare(options, hvd, train_row, lambda number: float(hvd.allreduce(tf.constant(number, tf.float64), name="mean", op=hvd.Average)))


def main():
    options = parse(__doc__, "demo-tf.json")
    if options.worker:
        worker(options)
        return 0
    return present(options, __file__, seconds_a_row=60)


if __name__ == "__main__":
    sys.exit(main())
