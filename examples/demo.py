"""Train a small network on Fashion-MNIST with ``horovodrun -np 2``, with and without DeepReduce.

``make demo`` runs this script. It prints a table and writes results/demo.json and results/demo.png.
"""

import os
import sys

from rows import compare, main


def worker(options):
    """Run the demo on one rank."""
    import fashion
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    def mean(number):
        return float(hvd.allreduce(torch.tensor([number], dtype=torch.float64), name="mean"))

    compare(options, hvd, fashion, lambda network: network.named_parameters(), mean)


if __name__ == "__main__":
    sys.exit(main(__doc__, __file__, worker, "demo.json", seconds_per_row=45))
