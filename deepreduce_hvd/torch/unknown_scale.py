"""Find scalers of losses that the compressor does not know, or that step too early."""

import sys
import weakref

from deepreduce_hvd.coordination.frames import frames_of
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.step_listener import StepListener

#: the module of torch.amp.GradScaler, from which all others of PyTorch derive
_SCALERS = "torch.amp.grad_scaler"


class UnknownScale(StepListener):
    """Warns if a ``GradScaler`` steps an optimizer of a compressor without ``loss_scale``.

    What is left in the residuals is a part of gradients of the scaled loss. If the scale changes,
    it is later added to gradients of another scale, and nothing else shows this.

    Args:
        adapter: the :class:`~deepreduce_hvd.torch.base_adapter.TorchAdapter` of the compressor.
    """

    def __init__(self, adapter):
        super().__init__()
        self._adapter = weakref.ref(adapter)
        self._looked_at: weakref.WeakSet = weakref.WeakSet()  # optimizers

    def end_step(self, optimizer):
        """Look for the scaler among the callers of an optimizer's first step with our results.

        hvd.broadcast_optimizer_state makes a step before any gradient was exchanged.
        """
        adapter = self._adapter()
        if adapter is None or optimizer in self._looked_at:
            return
        # it was closed, or registered with a model, or its constructor raised an error
        if getattr(adapter.compressor, "adapter", None) is not adapter:
            return
        owned = {one for group in optimizer.param_groups for one in group["params"]}
        slots = [one for one in adapter.slots.values() if one.parameter in owned]
        if not any(one.steps != one.untimed_steps and one.policy.memory.state for one in slots):
            return
        self._looked_at.add(optimizer)
        if adapter.transport.size > 1 and _is_called_by_a_scaler():
            adapter.warn_of_unknown_scale()


def expect_synchronized():
    """Raise InvalidArgumentError if a scaler is among the callers of the first result of a step.

    The scaler has divided the gradients by the scale, and the results, averages of the scaled
    gradients, would overwrite them. It does not show in the versions of the gradients.
    """
    if _is_called_by_a_scaler():
        raise InvalidArgumentError(
            "scaler.step: expected optimizer.synchronize() before it, and a step in `with"
            " optimizer.skip_synchronize():`, got an optimizer that synchronizes in its step, after"
            " the scaler has unscaled the gradients (docs/tutorial-torch.md, Loss scaling)"
        )


def _is_called_by_a_scaler():
    """Return whether an enabled scaler is among the callers. Only its frames are read."""
    for frame in frames_of(sys._getframe(1)):
        if frame.f_globals.get("__name__") == _SCALERS:
            scaler = frame.f_locals.get("self")
            if scaler is not None:
                return scaler.is_enabled()
    return False
