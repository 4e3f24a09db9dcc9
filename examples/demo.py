"""The main job: a small network on Fashion-MNIST under ``horovodrun -np 2``, with and without DeepReduce.

``make demo`` runs this. It prints a table and leaves results/demo.json and results/demo.png.
"""

import os
import sys

from rows import Trained, compare, parse, present


def worker(options):
    """What every rank runs."""
    import horovod.torch as hvd
    import torch
    from fashion import dense_bytes, load, train

    import deepreduce_hvd as dr

    hvd.init()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data = load()

    def train_row(name, codec, seed, watch):
        def compression(network):
            if codec is None:
                return getattr(hvd.Compression, name)
            watch.compressor = dr.Compressor(codec, parameters=network.named_parameters())
            return watch.compressor

        network, seconds, accuracy = train(data, compression, options.epochs, seed, watch, options.learning_rate)
        return Trained(accuracy, seconds, dense_bytes(network))

    compare(options, hvd, train_row, lambda number: float(hvd.allreduce(torch.tensor([number], dtype=torch.float64), name="mean")))


def main():
    options = parse(__doc__, "demo.json")
    if options.worker:
        worker(options)
        return 0
    return present(options, __file__, seconds_a_row=45)


if __name__ == "__main__":
    sys.exit(main())
