"""The training of fashion.py with PyTorch's DistributedDataParallel (DDP)."""

import torch
import torch.distributed as dist
from ddp_hooks import HOOKS
from fashion import Training
from torch.nn.parallel import DistributedDataParallel


class DdpTraining(Training):
    """Training with DDP over Gloo."""

    def __init__(self):
        dist.init_process_group("gloo")
        super().__init__(dist.get_rank(), dist.get_world_size())

    def baseline(self, name):
        return HOOKS[name]()

    def distribute(self, network, optimizer, compression):
        model = DistributedDataParallel(network, **getattr(compression, "options", {}))
        if compression is not None:
            compression.register(model)
        return model, optimizer

    def mean(self, number):
        total = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.size
