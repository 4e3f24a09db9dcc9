"""The adapter of a compressor that does not communicate yet: Horovod is missing or not in use."""

import importlib.util

import torch
import torch.distributed as dist

from deepreduce_hvd.adapters.base_adapter import BaseAdapter
from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.parameters import make_slots


class _NoTransport(Transport):
    """The transport of a process that has no peers yet."""

    process_set = None
    size = local_size = 1

    @property
    def rank(self):  # type: ignore[override]  # torch.distributed may begin later
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class UnattachedAdapter(BaseAdapter):
    """Keep the slots of the parameters until ``Compressor.register`` finds the other ranks.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        named: list of its (name, parameter) pairs.
    """

    def __init__(self, compressor, named):
        super().__init__(compressor, _NoTransport())
        self.slots = make_slots(compressor, named, lambda parameter: torch.device("cpu"))

    @staticmethod
    def _refuse(what):
        raise InvalidArgumentError(
            f"{what}: expected an initialized Horovod or a registered model, got neither; in "
            "PyTorch's DDP call register(ddp_model) first; for Horovod "
            + ("call hvd.init() before creating the compressor" if _has_horovod() else "install it")
        )

    def compress(self, tensor):
        self._refuse("compress")

    def decompress(self, tensor, context):
        self._refuse("decompress")

    def state_dict(self):
        self._refuse("state_dict")

    def load_state_dict(self, state):
        self._refuse("load_state_dict")

    def profile(self):
        self._refuse("profile")

    def timeline(self, path):
        self._refuse("timeline")

    def close_steps(self):
        """Do nothing: there are no steps."""

    def forget_steps(self):
        """Do nothing: there are no steps."""


def _has_horovod():
    return importlib.util.find_spec("horovod") is not None
