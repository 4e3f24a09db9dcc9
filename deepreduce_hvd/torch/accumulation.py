"""Which backward passes that synchronize belong to one step of an optimizer.

Memories with a momentum must not get the average of an earlier pass again, see
:attr:`deepreduce_hvd.Memory.needs_new_gradients`.

With loss scaling, an optimizer skips a step after an overflow. Then the memories must be as they
were before the first pass of the step, not before the last one. Nothing tells when a step ends: a
scaler does not call the optimizer that it skips. But then ``zero_grad`` comes before the next pass.
So a pass continues the step of the last one for a parameter whose ``.grad`` is still there, if no
optimizer has stepped it.
"""

import weakref

import torch

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.step_listener import StepListener


class Accumulation(StepListener):
    """Tells which parameters add the gradients of a backward pass to those of the last one.

    Args:
        slots: slots of the parameters.
        hooks: whether to look at ``.grad`` before each gradient of autograd is added to it. Without
            this, ``.grad`` changes only after the buffers of a pass are handed over.
    """

    def __init__(self, slots, hooks):
        super().__init__()
        self._by_id = {id(slot.parameter): slot for slot in slots}
        #: slot -> whether .grad had a gradient before the first pass since the last exchange
        self._had = {}
        self._hooks: list = []
        #: slots that need a hook, once they are trained
        self._unwatched = set(self._by_id.values()) if hooks else set()
        weakref.finalize(self, _remove, self._hooks).atexit = False  # type: ignore[misc]
        self.watch()

    def watch(self):
        """Look at the gradients of the parameters that are trained now."""
        for slot in list(self._unwatched):
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                self._watch(slot.parameter)
                self._unwatched.remove(slot)

    def _watch(self, parameter):
        # A hook of the tensor runs before the gradient is added to .grad. So does one of autograd's
        # node, but to keep it would keep the hooks of Horovod's optimizer too, and a program could
        # not delete that. The parameter may outlive the compressor, and must not keep the residuals
        # alive.
        own, key = weakref.ref(self), id(parameter)

        @torch._disable_dynamo  # which would trace it in a training step that is compiled
        def note(gradient):
            accumulation = own()
            if accumulation is not None:
                slot = accumulation._by_id[key]
                if slot not in accumulation._had:
                    accumulation._had[slot] = _has_gradient(slot.parameter)

        self._hooks.append(parameter.register_hook(note))

    def begin_step(self, optimizer):
        """Note that an optimizer steps its parameters, which ends their step.

        Returns:
            Their slots.
        """
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        slots = [self._by_id[id(one)] for one in parameters if id(one) in self._by_id]
        self._had.update(dict.fromkeys(slots, False))
        return slots

    def goes_on(self, slot):
        """Return whether a backward pass adds the gradient of a slot to an earlier one.

        Called when the first gradients of the pass are handed over.
        """
        had = self._had.get(slot)
        if had is None:  # without a hook, .grad may be of this pass
            return slot not in self._unwatched and _has_gradient(slot.parameter)
        return had

    def any_goes_on(self, slots):
        """Return whether a backward pass adds any gradient of these slots to an earlier one."""
        goes_on = any(map(self.goes_on, slots))
        self.watch()
        return goes_on

    def refuses(self, slot):
        """Return whether the memory of a slot cannot take the gradient that backward has made.

        False for the first gradient of a parameter that was frozen before.
        """
        if not slot.policy.memory.needs_new_gradients:
            return False
        if slot in self._unwatched:
            self.watch()
        return self._had.get(slot, False)

    def exchanged(self, slot):
        """Note that the gradient of a slot is exchanged, with all that was added to it before."""
        self._had.pop(slot, None)


def _remove(hooks):
    for hook in hooks:
        hook.remove()


def any_needs_new_gradients(slots):
    """Return whether the memory of any of these slots needs new gradients."""
    return any(slot.policy.memory.needs_new_gradients for slot in slots)


def refuse(slot):
    """Raise InvalidArgumentError for a gradient that :class:`Accumulation` refuses."""
    raise InvalidArgumentError(
        f"{slot.policy.memory!r}: expected one backward pass per step that synchronizes gradients,"
        " got another one, which added to the average of the first, so that the momentum would be"
        " applied to that again; add up gradients with no_sync() or backward_passes_per_step=, call"
        " zero_grad() in each step, or use Residual()"
    )


def _has_gradient(parameter):
    """Return whether ``.grad`` has anything but zeros; ``zero_grad`` may keep its memory."""
    gradient = parameter.grad
    if gradient is None:
        return False
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool(local.any())
