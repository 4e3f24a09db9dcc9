"""Find gradients that a program discards after they were exchanged.

Error feedback keeps the unsent part of each gradient and sends it in later steps. If the program
clears a gradient without a step, as for a bad batch or for the discriminator of a GAN, that part
arrives all the same. Nobody would notice, so a compressor warns.
"""

import weakref

from deepreduce_hvd.torch.step_listener import StepListener


class Discards(StepListener):
    """Tells whether a gradient was cleared without a step of an optimizer.

    Only parameters that an optimizer of PyTorch has stepped before count: other programs may apply
    gradients in a way of their own.

    Args:
        slots: slots of the parameters whose gradients are sent in part.
    """

    def __init__(self, slots):
        super().__init__()
        self._by_id = {id(slot.parameter): slot for slot in slots}
        self._stepped = set()  # slots of parameters that an optimizer has stepped
        #: slot -> its gradient at the last exchange, if no optimizer has stepped it since
        self._waiting = {}
        self._cleared = set()  # slots whose gradient was cleared while it was waiting for a step

    def made(self, slot):
        """Note that backward has made a gradient, or has added one to ``.grad``.

        DDP has not yet replaced ``.grad`` by a view of its bucket, which is the same in all steps,
        nor has fully_shard assigned the new one.
        """
        waiting = self._waiting.get(slot)
        if waiting is None:
            return
        last = waiting()
        if last is None or last is not slot.parameter.grad:
            self._cleared.add(slot)

    def found_in(self, slot):
        """Note that a gradient was exchanged; return whether the one before was discarded.

        Args:
            slot: slot of the gradient, which ``.grad`` of the parameter has now.
        """
        gradient = slot.parameter.grad
        if slot not in self._stepped or gradient is None:
            return False
        self._waiting[slot] = weakref.ref(gradient)
        found = slot in self._cleared
        self._cleared.discard(slot)
        return found

    def begin_step(self, optimizer):
        """Note that an optimizer begins to step.

        Its closure may make gradients several times, which it uses. So they do not wait meanwhile.
        """
        self._stepped.difference_update(self._forget(optimizer))

    def end_step(self, optimizer):
        """Note that an optimizer has stepped its parameters."""
        self._stepped.update(self._forget(optimizer))

    def _forget(self, optimizer):
        """Forget the gradients of an optimizer's parameters; return their slots."""
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        slots = [self._by_id[id(one)] for one in parameters if id(one) in self._by_id]
        for slot in slots:
            self._waiting.pop(slot, None)
            self._cleared.discard(slot)
        return slots


def warning(slot):
    """Return the warning about a discarded gradient."""
    return (
        f"the gradient of {slot.name} was exchanged, and then cleared or replaced before a step of"
        " its optimizer. The part of it that was not sent stays in the residual and is sent in"
        " later steps. To leave out a batch, decide before backward; to train only a part of a"
        " network, freeze the rest with requires_grad_(False). If the program applies the gradient"
        " in another way, nothing is wrong (docs/troubleshooting.md, The accuracy drops)"
    )
