"""Two ranks per host with PyTorch's fully_shard. Started by test_ddp_hosts.py with torchrun."""

import json
import os
import pathlib

import torch
import torch.distributed as dist
from ddp_worker import DdpRank
from host_rank import CODECS, STEPS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deepreduce_hvd as dr


class FsdpRank(DdpRank):
    """A rank with one shard of its host's copy of the model."""

    def __init__(self):
        super().__init__()
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        shape, names = (self.size // ranks, ranks), ("hosts", "ranks")
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def attach(self, layers, codec):
        for layer in layers:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self._mesh["ranks"])
        fully_shard(layers, mesh=self._mesh["ranks"])
        compressor = dr.Compressor(codec, parameters=layers.named_parameters())
        compressor.register(layers, self._mesh["hosts"])
        return layers, torch.optim.SGD(layers.parameters(), lr=0.05), compressor

    def train(self, directory):
        """Train with several codecs; write the bytes of the interface and those of stats()."""
        report = {"host": os.uname().nodename, "hosts": self._mesh.shape[0]}
        for name, codec in CODECS.items():
            step, compressor, layers = self.training(codec)
            step()
            sent, claimed = [], []
            for _ in range(STEPS):
                sent.append(self.bytes_of(step))
                claimed.append(sum(row["sent_bytes"] for row in compressor.stats().values()))
            shards = [one.to_local().flatten() for one in layers.parameters()]
            own = torch.cat(shards).detach().view(torch.int32)
            copies = [torch.empty_like(own) for _ in range(self._mesh.shape[0])]
            dist.all_gather(copies, own, group=self._mesh["hosts"].get_group())
            assert all(torch.equal(one, own) for one in copies), f"{name}: copies differ"
            report[name] = {"sent": sent, "claimed": claimed, "elements": own.numel()}
        (pathlib.Path(directory) / f"report.{self.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    FsdpRank().run()
