"""One rank of benchmarks/hosts.py with PyTorch's DistributedDataParallel (DDP)."""

import datetime
import sys

import torch
import torch.distributed as dist
from exchange import Exchange, Job, Network, dense_bytes, optimizer_of, sent_bytes
from folders import EXAMPLES, module_at
from hosts_codecs import CHUNKS, RECOMMENDED
from torch.nn.parallel import DistributedDataParallel

import deepreduce_hvd as dr

ddp_hooks = module_at(EXAMPLES / "ddp_hooks.py")
PREFIX = "DDP: "
#: {row: function of named parameters that returns what has ``register(model)``, or None}
ROWS = {
    PREFIX + name: make
    for name, make in {
        "none": lambda named: None,
        "fp16": lambda named: ddp_hooks.HOOKS["fp16"](),
        # from the third step on; earlier, PyTorch refuses
        "PowerSGD rank 4": lambda named: ddp_hooks.power_sgd(4, start=2),
        "Allgather": lambda named: dr.Compressor(RECOMMENDED, parameters=named),
        "Allgather, chunks": lambda named: dr.Compressor(CHUNKS, parameters=named),
    }.items()
}


class DdpJob(Job):
    """The ranks of a job of torchrun."""

    def __init__(self):
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
        self.rank = dist.get_rank()

    def start_together(self):
        dist.barrier()

    def broadcast(self, number):
        numbers = [number]
        dist.broadcast_object_list(numbers)
        return numbers[0]

    def gather(self, entry):
        entries = [None] * dist.get_world_size()
        dist.all_gather_object(entries, entry)
        return entries

    def exchange(self, name):
        network = Network()
        hook = ROWS[name](network.named)
        model = DistributedDataParallel(
            network, gradient_as_bucket_view=True, **getattr(hook, "options", {})
        )
        if hook is None:
            return Exchange(model, optimizer_of(network), dense_bytes, 1)
        hook.register(model)
        if isinstance(hook, dr.Compressor):
            return Exchange(model, optimizer_of(network), lambda: sent_bytes(hook), 3)
        return Exchange(model, optimizer_of(network), hook.bytes_per_step, 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    DdpJob().run(sys.argv[1].split(";"), float(sys.argv[2]))
    dist.destroy_process_group()
