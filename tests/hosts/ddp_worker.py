"""One rank per host with PyTorch's DDP. The first argument selects the task.

Started by test_ddp_hosts.py with torchrun on every host.
"""

import datetime
import os
import signal

import torch
import torch.distributed as dist
from host_rank import HostRank
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr


class DdpRank(HostRank):
    """A rank of a job of torchrun."""

    def __init__(self):
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self):
        dist.barrier()

    def attach(self, layers, codec):
        model = DistributedDataParallel(layers)
        compressor = dr.Compressor(codec, parameters=layers.named_parameters())
        compressor.register(model)
        return model, torch.optim.SGD(layers.parameters(), lr=0.05), compressor

    def gather(self, own):
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own)
        return gathered

    def expected_on_the_wire(self, stats):
        """Gathers send to P - 1 other ranks, and allreduces are rings."""
        ways = {"compressed": 0, "dense": 0}
        for row in stats.values():
            ways[row["path"]] += row["sent_bytes"]
        return (self.size - 1) * (ways["compressed"] + 2 * ways["dense"] / self.size)

    def killed_in_a_step(self, directory):
        """The last rank kills itself in its third step, before it encodes a bucket."""
        step, compressor, _ = self.training(None)
        steps, average = 0, compressor.adapter.average

        def average_or_die(bucket):
            if self.rank == self.size - 1 and steps == 2 and bucket.is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return average(bucket)

        compressor.adapter.average = average_or_die
        for steps in range(1000):  # noqa: B007  # the function above reads it
            step()

    def run(self):
        super().run()
        dist.destroy_process_group()


if __name__ == "__main__":
    DdpRank().run()
