"""Find gradients with which an optimizer steps although they were not exchanged.

Horovod registers its hooks when ``hvd.DistributedOptimizer`` is created, for the parameters that
are trained then. A layer that is trained only later has no hook. Neither does Horovod wait for
gradients that a closure makes within ``step()``. Each rank then updates the parameters with its own
gradients, and the models of the ranks differ from there on.
"""

import warnings

from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.torch.step_listener import StepListener


class Unexchanged(StepListener):
    """Warns once about such gradients, after a step of an optimizer.

    Args:
        steps: the :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerSteps` of a compressor.
        parameters: its :class:`~deepreduce_hvd.torch.parameters.Parameters`, which from now on
            note what was not exchanged.
        transport: its transport.
    """

    def __init__(self, steps, parameters, transport):
        super().__init__()
        self._steps = steps
        self._transport = transport
        self._made = parameters.unexchanged = {}
        self._has_warned = False

    def exchanged(self, slot):
        """Note that the gradient of a slot is exchanged."""
        self._made.pop(slot, None)

    def end_step(self, optimizer):
        """Look at the gradients with which an optimizer has stepped."""
        step = self._steps.last_of(optimizer)  # None for an optimizer that is not Horovod's
        if step is None or self._has_warned or self._transport.size == 1:
            return
        names = self._names(optimizer, step)
        if names:
            self._has_warned = True
            warnings.warn(f"deepreduce_hvd: {_text(names)}", stacklevel=4)

    def _names(self, optimizer, step):
        """Return the names of the parameters whose gradients were made, but not exchanged.

        Sparse gradients do not count: Horovod reduces them without the compressor.
        """
        if not step.complete:  # nobody has waited for its results
            return [slot.name for slot in step.slots]
        if not self._made:  # as in almost all steps
            return []
        names = {id(slot.parameter): slot.name for slot in self._made}
        owned = (one for group in optimizer.param_groups for one in group["params"])
        return [names[id(one)] for one in owned if id(one) in names and _is_dense(one.grad)]


def _is_dense(gradient):
    return gradient is not None and not gradient.is_sparse


def _text(names):
    return (
        f"the optimizer has used a gradient of {some_of(names)} that was not exchanged, so from now"
        " on the models of the ranks differ. Horovod exchanges gradients of parameters that are"
        " trained when hvd.DistributedOptimizer is created, and that are made before step(). So"
        " freeze layers after that, create the optimizer again for new parameters, and do not give"
        " step() a closure (docs/tutorial-torch.md)"
    )
