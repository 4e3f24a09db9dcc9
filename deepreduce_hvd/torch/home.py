"""Choose the adapter that a new compressor of PyTorch parameters starts with.

It is Horovod's where Horovod can be imported. ``Compressor.register`` replaces it by the one for
PyTorch's DDP, which needs no Horovod.
"""

try:
    import horovod.torch  # noqa: F401
except ImportError:
    from deepreduce_hvd.torch.unattached import UnattachedAdapter as Adapter
else:
    from deepreduce_hvd.torch.adapter import Adapter

__all__ = ["Adapter"]
