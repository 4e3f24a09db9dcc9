"""Elastic training on PyTorch: ``hvd.elastic.TorchState(compressor=comp, model=..., ...)``."""

import functools

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import state as horovod_state

from deepreduce_hvd.coordination.elastic import MemoryKeeper, save_together
from deepreduce_hvd.errors import InvalidArgumentError


class CompressorStateHandler(horovod_state.StateHandler):
    """Save, restore and hand over the states of all compressors of a ``TorchState``.

    Horovod calls these methods, on all ranks at once except for ``restore``.

    Attributes:
        keeper: the :class:`MemoryKeeper` of this handler's compressor.
        keepers: those that this handler calls: all of the state in its first handler, none in the
            others.
    """

    def __init__(self, compressor):
        super().__init__(compressor)
        self.keeper = MemoryKeeper(compressor, HorovodInternalError)
        self.keepers = [self.keeper]

    def set_value(self, value):
        """Refuse another compressor, which the commits would not have."""
        if value is not self.value:
            raise InvalidArgumentError(
                "TorchState: expected the compressor that the state was created with, got another"
                " one; create a new TorchState for it"
            )

    def save(self):
        save_together(self.keepers)

    def restore(self):
        for keeper in self.keepers:
            keeper.restore()

    def sync(self):
        for keeper in self.keepers:
            keeper.sync()


def register(compressor_class):
    """Register the handler of Compressors with hvd.elastic.TorchState.

    Args:
        compressor_class: class of the compressors that a ``TorchState`` may get.
    """
    known = horovod_state.get_handler_registry()
    if all(kind is not compressor_class for kind, _ in known):
        horovod_state.set_handler_registry([*known, (compressor_class, CompressorStateHandler)])
    if not hasattr(horovod_state._get_handlers, "__wrapped__"):
        horovod_state._get_handlers = _compressors_first(horovod_state._get_handlers)


def _compressors_first(get_handlers):
    """Wrap Horovod's function that makes the handlers of a ``TorchState``.

    Horovod calls them in the order of the keywords. A commit of compressors fails if a rank is
    lost, and a handler that had saved a model before would then restore another commit than they.
    """

    @functools.wraps(get_handlers)
    def call(values):
        handlers, rest = get_handlers(values)
        ours = {
            name: handler
            for name, handler in handlers.items()
            if isinstance(handler, CompressorStateHandler)
        }
        keepers = [handler.keeper for handler in ours.values()]
        for position, handler in enumerate(ours.values()):
            handler.keepers = keepers if position == 0 else []
        return {**ours, **handlers}, rest

    return call
