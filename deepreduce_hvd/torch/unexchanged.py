"""Find gradients with which an optimizer steps although they were not exchanged.

Horovod registers its hooks when ``hvd.DistributedOptimizer`` is created, for the parameters that
are trained then. A layer that is trained only later has no hook. Neither does Horovod wait for
gradients that a closure makes within ``step()``. Each rank then updates the parameters with its own
gradients, and the models of the ranks differ from there on.
"""

import functools
import weakref

from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: weakref.WeakSet = weakref.WeakSet()  # adapters


def watch(adapter):
    """Let an adapter look for such gradients after each step of an optimizer."""
    _register_step_hook()
    _watched.add(adapter)


def names_of(optimizer, step, parameters):
    """Return the names of the parameters whose gradients were made, but not exchanged.

    Sparse gradients do not count: Horovod reduces them without the compressor.

    Args:
        optimizer: the optimizer that has stepped.
        step: its last :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerStep`.
        parameters: the :class:`~deepreduce_hvd.torch.parameters.Parameters`.
    """
    if not step.complete:  # nobody has waited for its results
        return [slot.name for slot in step.slots]
    slots = [
        parameters.get(one)
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None and not one.grad.is_sparse
    ]
    return [slot.name for slot in slots if slot is not None and slot.made]


def warning(names):
    """Return the warning about gradients that were not exchanged."""
    return (
        f"the optimizer has used a gradient of {names} that was not exchanged, so from now on the"
        " models of the ranks differ. Horovod exchanges gradients of parameters that are trained"
        " when hvd.DistributedOptimizer is created, and that are made before step(). So freeze"
        " layers after that, create the optimizer again for new parameters, and do not give step()"
        " a closure (docs/tutorial-torch.md)"
    )


@functools.cache
def _register_step_hook():
    """Look after the steps of all optimizers of the process, once."""
    register_optimizer_step_post_hook(_look)


def _look(optimizer, arguments, keywords):
    for adapter in list(_watched):
        adapter.look_for_unexchanged(optimizer)
