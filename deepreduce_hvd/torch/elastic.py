"""Elastic training on PyTorch: what ``hvd.elastic.TorchState(compressor=comp, model=..., ...)``
does with a Compressor.
"""

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.coordination.elastic import MemoryKeeper


class CompressorStateHandler(StateHandler):
    """Saves, restores and hands over one Compressor's state; Horovod calls it, on all ranks at once
    but for ``restore``.
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


def register():
    """Makes hvd.elastic.TorchState know what to do with a Compressor."""
    known = get_handler_registry()
    if all(kind is not Compressor for kind, _ in known):
        set_handler_registry([*known, (Compressor, CompressorStateHandler)])
