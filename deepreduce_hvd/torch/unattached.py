"""The adapter of a compressor that does not communicate yet, where there is no Horovod."""

import torch

from deepreduce_hvd.base_adapter import BaseAdapter
from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.parameters import make_slots


class _NoTransport(Transport):
    """The transport of a process that has no peers yet."""

    process_set = None
    size = local_size = 1
    rank = 0


class Adapter(BaseAdapter):
    """Keep the slots of the parameters until ``Compressor.register`` finds the other ranks.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        named: list of its (name, parameter) pairs.
    """

    def __init__(self, compressor, named):
        super().__init__(compressor, _NoTransport())
        self.slots = make_slots(compressor, named, lambda parameter: torch.device("cpu"))

    def _refuse(self, what):
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            raise InvalidArgumentError(
                f"{what}: expected a compressor that knows the other ranks, got one without Horovod "
                f"({error}); in PyTorch's DDP call register(ddp_model) first, otherwise install Horovod"
            ) from error
        raise InvalidArgumentError(
            f"{what}: expected Horovod when the compressor was created, got it later; create the "
            "compressor again"
        )

    def compress(self, tensor):
        self._refuse("compress")

    def decompress(self, tensor, context):
        self._refuse("decompress")

    def state_dict(self):
        self._refuse("state_dict")

    def load_state_dict(self, state):
        self._refuse("load_state_dict")

    def close_round(self):
        """Do nothing: there are no steps."""

    def forget_rounds(self):
        """Do nothing: there are no steps."""
