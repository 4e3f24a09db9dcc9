"""One rank per host with Horovod. The first argument selects the task.

Started by test_hosts.py with horovodrun over ssh.
"""

import os
import pathlib
import signal
import sys

import horovod.torch as hvd
import torch
from host_rank import HostRank

import deepreduce_hvd as dr
from deepreduce_hvd.communicators.wire import PROBE_BYTES


class HorovodRank(HostRank):
    """A rank of a job of horovodrun."""

    def __init__(self):
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def barrier(self):
        hvd.barrier()

    def attach(self, layers, codec):
        named = list(layers.named_parameters())
        compressor = dr.Compressor(codec, parameters=named)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=0.05),
            named_parameters=named,
            compression=compressor,
        )
        return layers, optimizer, compressor

    def gather(self, own):
        return hvd.allgather(own.view(1, -1), name="replicas")

    def expected_on_the_wire(self, stats):
        """Gathers send to P - 1 other ranks, and allreduces are rings."""
        gathered = sum(
            row["sent_bytes"] - PROBE_BYTES for row in stats.values() if row["path"] == "compressed"
        )
        reduced = sum(
            row["sent_bytes"] if row["path"] == "dense" else PROBE_BYTES for row in stats.values()
        )
        return (self.size - 1) * (gathered + 2 * reduced / self.size)

    def killed_in_a_step(self, directory):
        """The last rank kills itself in its third step, between the messages of two gradients."""
        step, compressor, _ = self.training(None)
        steps, calls, session = 0, 0, compressor.adapter
        compress = session.compress

        def compress_or_die(tensor):
            nonlocal calls
            if self.rank == self.size - 1 and steps == 2 and calls == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += steps == 2
            return compress(tensor)

        session.compress = compress_or_die
        for steps in range(1000):  # noqa: B007  # the function above reads it
            step()

    def run(self):
        what, directory = sys.argv[1:]
        if what != "train":
            # a host whose interface is down cannot report to horovodrun
            said = os.open(
                pathlib.Path(directory) / f"said.{self.rank}", os.O_WRONLY | os.O_CREAT, 0o644
            )
            os.dup2(said, sys.stderr.fileno())
        super().run()


if __name__ == "__main__":
    HorovodRank().run()
