"""Backward passes that synchronize, and which of them belong to one step of the optimizer.

With loss scaling, an optimizer skips a step after an overflow. Then the memories must be as they
were before the first pass of the step, not before the last one. Nothing tells when a step ends: a
scaler does not call the optimizer that it skips. But then ``zero_grad`` comes before the next pass.
So a pass continues the step of the last one for a parameter whose ``.grad`` is still there, if no
optimizer has stepped it.
"""

import functools
import time
import weakref

from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

_known: weakref.WeakSet = weakref.WeakSet()  # all instances of Accumulation


class BackwardPass:
    """One backward pass that synchronizes.

    Args:
        task: id of the pass in the autograd engine, or None if it is not needed.

    Attributes:
        loss_scale: loss scale of this step, or None.
        slots: slots whose gradients have come.
        earlier: slots of earlier passes of the same step.
        jobs: the :class:`~deepreduce_hvd.torch.ddp.buckets.BucketJob` of each bucket so far.
        buckets: names of the parameters in each of them.
        void: whether some result has NaN or Inf.
        device_sums: the :class:`~deepreduce_hvd.torch.cuda.device.DeviceSums` of the pass, or None.
        failure: an error at its beginning, or None.
        ended: whether all gradients so far have been waited for.
    """

    def __init__(self, task=None):
        self.task = task
        self.loss_scale = None
        self.slots = []
        self.earlier = []
        self.jobs = []
        self.buckets = []
        self.void = False
        self.device_sums = None
        self.failure = None
        self.ended = True

    def end(self):
        """Wait for all buckets and release them.

        Returns:
            The error of the first bucket that failed, or None.
        """
        for job in self.jobs:
            job.ended.wait()
        error = next((job.error for job in self.jobs if job.error is not None), None)
        self.jobs.clear()
        return error

    def settle(self, seconds):
        """Wait until no bucket is exchanged, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        for job in self.jobs:
            job.ended.wait(max(deadline - time.monotonic(), 0))


class Accumulation:
    """Tells which parameters add the gradients of a backward pass to those of the last one.

    Args:
        slots: slots of the parameters.
        hooks: whether to look at ``.grad`` before each gradient of autograd is added to it. Without
            this, ``.grad`` changes only after the buffers of a pass are handed over.
    """

    def __init__(self, slots, hooks):
        self._by_id = {id(slot.parameter): slot for slot in slots}
        self._open = []  # slots of the last passes, whose step may go on
        #: slot -> whether .grad had a gradient before the first pass since the last exchange
        self._had = {}
        self._nodes = []  # of autograd; a node and its hooks live as long as someone refers to it
        _register_step_hook()
        _known.add(self)
        if hooks:
            for slot in slots:
                if slot.parameter.requires_grad and slot.parameter.is_leaf:
                    self._watch(slot.parameter)

    def _watch(self, parameter):
        # DDP keeps the node, which must not keep the residuals alive
        own = weakref.ref(self)

        def note(gradients):
            accumulation = own()
            if accumulation is not None:
                slot = accumulation._by_id[id(parameter)]
                if slot not in accumulation._had:
                    accumulation._had[slot] = _has_gradient(parameter)

        node = get_gradient_edge(parameter).node
        node.register_prehook(note)
        self._nodes.append(node)

    def stepped(self, optimizer):
        """Note that an optimizer steps its parameters, which ends their step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = self._by_id.get(id(parameter))
                if slot is not None:
                    self._had[slot] = False

    def begin(self):
        """Return the slots whose step goes on; called at the first buffer of a backward pass.

        Their ``continues`` is set. All others begin a new step.
        """
        going_on = [slot for slot in self._open if self._goes_on(slot)]
        for slot in {*self._by_id.values()}.difference(going_on):
            slot.continues = slot.void = False
        for slot in going_on:
            slot.continues = True
        return going_on

    def _goes_on(self, slot):
        had = self._had.get(slot)
        return _has_gradient(slot.parameter) if had is None else had

    def exchanged(self, slot):
        """Note that the gradient of a slot is exchanged, with all that was added to it before."""
        self._had.pop(slot, None)

    def end(self, slots):
        """Note the slots of a step that may go on."""
        self._open = list(dict.fromkeys(slots))


def _has_gradient(parameter):
    """Return whether ``.grad`` has anything but zeros; ``zero_grad`` may keep its memory."""
    gradient = parameter.grad
    if gradient is None:
        return False
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool(local.any())


@functools.cache
def _register_step_hook():
    """Register :func:`_note_step` with all optimizers of the process, once."""
    register_optimizer_step_pre_hook(_note_step)


def _note_step(optimizer, arguments, keywords):
    for accumulation in list(_known):
        accumulation.stepped(optimizer)
