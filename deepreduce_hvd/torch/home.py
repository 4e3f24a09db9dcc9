"""Choose the adapter that a new compressor of PyTorch parameters starts with."""

import importlib
import sys

import torch.distributed as dist

from deepreduce_hvd.torch.unattached import UnattachedAdapter


def create_adapter(compressor, named):
    """Return Horovod's adapter if Horovod is initialized, else an :class:`UnattachedAdapter`.

    Horovod is imported here, unless the program has initialized torch.distributed and not Horovod.
    A program that has initialized neither may still do so for torch.distributed.
    """
    if not _uses_torch_distributed():
        try:
            horovod = importlib.import_module("horovod.torch")
        except ImportError:
            return UnattachedAdapter(compressor, named)
        if horovod.is_initialized():
            return importlib.import_module("deepreduce_hvd.torch.adapter").Adapter(
                compressor, named
            )
    return UnattachedAdapter(compressor, named)


def _uses_torch_distributed():
    """Return whether torch.distributed is initialized and Horovod is not."""
    horovod = sys.modules.get("horovod.torch")
    uses_horovod = horovod is not None and horovod.is_initialized()
    return dist.is_available() and dist.is_initialized() and not uses_horovod
