"""Train a small network on Fashion-MNIST with ``horovodrun -np 2``, with and without DeepReduce.

``make demo`` runs this script. It prints a table and writes demo.json and demo.png in
build/results/.
"""

import os
import sys

from rows import Demo


def worker(demo):
    """Run the demo on one rank."""
    import torch
    from fashion_horovod import HorovodTraining

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    demo.compare(HorovodTraining())


if __name__ == "__main__":
    sys.exit(Demo(__doc__, __file__, "demo.json", seconds_per_row=45).main(worker))
