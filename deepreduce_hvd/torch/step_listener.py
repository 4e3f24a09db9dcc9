"""StepListener: an object that is told when an optimizer of the process steps."""

import functools
import weakref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_listeners: weakref.WeakSet = weakref.WeakSet()


class StepListener:
    """Base class of objects that follow the steps of all optimizers of PyTorch."""

    def __init__(self):
        _register()
        _listeners.add(self)

    def begin_step(self, optimizer):
        """Note that an optimizer begins to step. The default does nothing."""

    def end_step(self, optimizer):
        """Note that an optimizer has stepped its parameters. The default does nothing."""


@functools.cache
def _register():
    """Register the hooks with all optimizers of the process, once."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _begin(optimizer, arguments, keywords):
    for listener in list(_listeners):
        listener.begin_step(optimizer)


# Hidden from Dynamo, which would trace it in a training step that is compiled as a whole.
# ``_begin`` is not hidden: Dynamo would then trace the step of a prepared optimizer.
@torch._disable_dynamo
def _end(optimizer, arguments, keywords):
    for listener in list(_listeners):
        listener.end_step(optimizer)
