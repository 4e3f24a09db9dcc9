"""The training of fashion.py with Horovod."""

import horovod.torch as hvd
import torch
from fashion import Training


class HorovodTraining(Training):
    """Training with Horovod's DistributedOptimizer."""

    def __init__(self):
        hvd.init()
        super().__init__(hvd.rank(), hvd.size())

    def baseline(self, name):
        return getattr(hvd.Compression, name)

    def distribute(self, network, optimizer, compression):
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=network.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        return network, optimizer

    def mean(self, number):
        return float(hvd.allreduce(torch.tensor([number], dtype=torch.float64), name="mean"))
