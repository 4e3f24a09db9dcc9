"""One rank of benchmarks/hosts.py with Horovod."""

import sys
import time

import horovod.torch as hvd
import torch
from exchange import Exchange, Job, Network, dense_bytes, optimizer_of, sent_bytes
from hosts_codecs import CHUNKS, RATIO, RECOMMENDED

import deepreduce_hvd as dr


def _instance(codec, communicator=None, memory=None):
    """Return a function of named parameters that makes a compressor."""
    return lambda named: dr.Compressor(codec, memory, communicator, parameters=named)


def _table():
    """Return {row: function that makes its compression}; None stands for no Horovod at all.

    Communicators have their default settings.
    """
    from deepreduce_hvd import communicators

    return {
        "no exchange": None,
        "none": lambda named: hvd.Compression.none,
        "fp16": lambda named: hvd.Compression.fp16,
        "Allgather": _instance(RECOMMENDED),
        "Allgather, chunks": _instance(CHUNKS),
        "Allgather, Top-r pairs": _instance(dr.Codec(dr.TopK(RATIO))),
        "SplitAllgather": _instance(RECOMMENDED, communicators.SplitAllgather()),
        "RecursiveDoubling": _instance(RECOMMENDED, communicators.RecursiveDoubling()),
        "Auto": _instance(RECOMMENDED, communicators.Auto()),
        "GTopK": _instance(RECOMMENDED, communicators.GTopK()),
        "CLTK": _instance(CHUNKS, communicators.CLTK(), dr.LowPass(0.1)),
        "SharedRandomK": _instance(dr.Codec(dr.RandomK(RATIO)), communicators.SharedRandomK()),
    }


ROWS = _table()


class HorovodJob(Job):
    """The ranks of a job of horovodrun."""

    def __init__(self):
        hvd.init()
        self.rank = hvd.rank()

    def start_together(self):
        handle = hvd.allreduce_async(torch.zeros(1), name="start")
        while not hvd.poll(handle):  # Horovod's own barrier would not sleep
            time.sleep(1e-4)
        hvd.synchronize(handle)

    def broadcast(self, number):
        return hvd.broadcast_object(number)

    def gather(self, entry):
        return hvd.allgather_object(entry)

    def exchange(self, name):
        network, make = Network(), ROWS[name]
        optimizer = optimizer_of(network)
        if make is None:
            return Exchange(network, optimizer, lambda: 0, 1)
        compression = make(network.named)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=network.named, compression=compression
        )
        if isinstance(compression, dr.Compressor):
            return Exchange(network, optimizer, lambda: sent_bytes(compression), 3)
        claimed = dense_bytes() // (2 if name == "fp16" else 1)
        return Exchange(network, optimizer, lambda: claimed, 1)


if __name__ == "__main__":
    HorovodJob().run(sys.argv[1].split(";"), float(sys.argv[2]))
