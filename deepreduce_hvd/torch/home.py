"""Choose the adapter that a new compressor of PyTorch parameters starts with.

It is Horovod's where Horovod can be imported. ``Compressor.register`` replaces it by the one for
PyTorch's DDP, which needs no Horovod.
"""

import importlib

try:
    import horovod.torch  # noqa: F401
except ImportError:
    _home = importlib.import_module("deepreduce_hvd.torch.unattached")
else:
    _home = importlib.import_module("deepreduce_hvd.torch.adapter")

Adapter = _home.Adapter

__all__ = ["Adapter"]
