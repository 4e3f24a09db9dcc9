"""Register a compressor with a model of PyTorch: DDP or fully_shard."""

import importlib

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.ddp import adapter as ddp


def register(compressor, model, mesh):
    """Implement :meth:`Compressor.register <deepreduce_hvd.Compressor.register>`."""
    if isinstance(model, FSDPModule):
        # it uses parts of PyTorch that another PyTorch may not have
        importlib.import_module("deepreduce_hvd.torch.fsdp.adapter").register(
            compressor, model, mesh
        )
        return
    if isinstance(model, FullyShardedDataParallel):
        raise InvalidArgumentError(
            "register: expected a module after torch.distributed.fsdp.fully_shard, got a "
            "FullyShardedDataParallel (FSDP1), whose hook cannot compress only between hosts; use "
            "fully_shard, or DistributedDataParallel in place of ShardingStrategy.NO_SHARD"
        )
    if not isinstance(model, DistributedDataParallel):
        advice = "wrap the model in DDP first"
        if mesh is not None or _has_sharded_layers(model):
            advice = "call fully_shard on the whole network too"
        raise InvalidArgumentError(
            "register: expected a torch.nn.parallel.DistributedDataParallel or a module after "
            f"fully_shard, got {type(model).__name__}; register before torch.compile, and {advice}"
        )
    if mesh is not None:
        raise InvalidArgumentError(
            "register: expected no mesh for a DistributedDataParallel, which has a process group,"
            f" got {mesh!r}; leave it out"
        )
    ddp.register(compressor, model)


def _has_sharded_layers(model):
    return isinstance(model, Module) and any(isinstance(one, FSDPModule) for one in model.modules())
