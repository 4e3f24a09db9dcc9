"""Elastic training on PyTorch: ``hvd.elastic.TorchState(compressor=comp, model=..., ...)``."""

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from deepreduce_hvd.coordination.elastic import MemoryKeeper


class CompressorStateHandler(StateHandler):
    """Save, restore and hand over one Compressor's state.

    Horovod calls these methods, on all ranks at once except for ``restore``.
    """

    def __init__(self, compressor):
        super().__init__(compressor)
        self._keeper = MemoryKeeper(compressor, HorovodInternalError)

    def save(self):
        self._keeper.save()

    def restore(self):
        self._keeper.restore()

    def sync(self):
        self._keeper.sync()


def register(compressor_class):
    """Register the handler of Compressors with hvd.elastic.TorchState.

    Args:
        compressor_class: class of the compressors that a ``TorchState`` may get.
    """
    known = get_handler_registry()
    if all(kind is not compressor_class for kind, _ in known):
        set_handler_registry([*known, (compressor_class, CompressorStateHandler)])
