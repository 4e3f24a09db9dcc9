"""Train a small Keras network on Fashion-MNIST with ``horovodrun -np 2`` and DeepReduce.

``make demo-tf`` runs this script, which also trains without DeepReduce. It prints a table and
writes demo-tf.json and demo-tf.png in build/results/.
"""

import os
import sys

from rows import Demo


def worker(demo):
    """Run the demo on one rank."""
    # Horovod's DistributedOptimizer wraps the optimizers of tf-keras
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from fashion_tensorflow import KerasTraining

    demo.compare(KerasTraining())


if __name__ == "__main__":
    sys.exit(Demo(__doc__, __file__, "demo-tf.json", seconds_per_row=60).main(worker))
