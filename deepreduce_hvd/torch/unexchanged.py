"""Find gradients with which an optimizer steps although they were not exchanged.

Horovod and DDP exchange gradients of the parameters that were trained when they were called. A
layer that is added or trained only later is left out. Neither does Horovod wait for gradients that
a closure makes within ``step()``, nor does DDP exchange those of passes that bypass the DDP model.
Each rank then updates the parameters with its own gradients, and the models of the ranks differ
from there on.
"""

import weakref

from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.torch.step_listener import StepListener
from deepreduce_hvd.user_warnings import warn

_HOROVOD_ADVICE = (
    "Horovod exchanges gradients of parameters that are trained when hvd.DistributedOptimizer is"
    " created, and that are made before step(). So freeze layers after that, create the optimizer"
    " again for new parameters, and do not give step() a closure (docs/tutorial-torch.md)"
)
_DDP_ADVICE = (
    "DDP exchanges gradients of parameters that are trained when DistributedDataParallel is called,"
    " in backward passes outside of no_sync() whose forward pass called the DDP model. So add"
    " layers before you call it, and freeze layers after that, with find_unused_parameters=True."
    " Call the DDP model itself (docs/tutorial-ddp.md)"
)


class Unexchanged(StepListener):
    """Warns once about such gradients, after a step of an optimizer.

    Args:
        parameters: the :class:`~deepreduce_hvd.torch.parameters.Parameters`, which from now on note
            what was not exchanged.
        transport: the transport of the adapter.
        steps: under Horovod, the :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerSteps`,
            which know its optimizers. Under DDP, None: all optimizers count.
        may_stay: function of a slot that returns whether its gradients may stay unexchanged.
        added: function of an optimizer and of the ids of those of its parameters that have no slot.
            It returns (name, parameter) of the ones that were added too late to be exchanged. The
            default is for optimizers of Horovod.
    """

    def __init__(self, parameters, transport, steps=None, may_stay=None, added=None):
        super().__init__()
        self._find_added = added or _added_to_horovod
        self._transport = transport
        self._advice = _DDP_ADVICE if steps is None else _HOROVOD_ADVICE
        self._steps = steps
        self._may_stay = may_stay or (lambda slot: False)
        self._parameters = parameters
        self._made = parameters.unexchanged = {}
        self._has_warned = False
        _all.add(self)

    def exchanged(self, slots):
        """Note that the gradients of slots are exchanged.

        A parameter of two models has a slot in the compressor of each.
        """
        # there is mostly one, and to copy the set for each gradient takes time
        for one in (self,) if len(_all) == 1 else list(_all):
            for slot in slots:
                one._made.pop(id(slot.parameter), None)

    def close(self):
        """Stop, when the compressor is closed. Hooks of its parameters may stay for a while."""
        self._parameters.unexchanged = None
        self._made.clear()
        _all.discard(self)

    def end_step(self, optimizer):
        """Look at the gradients with which an optimizer has stepped."""
        # the size is not known after hvd.shutdown()
        if self._has_warned or (self._steps is None and self._transport.size == 1):
            return
        names = self._names(optimizer)
        if names and self._transport.size > 1:
            self._has_warned = True
            warn(f"{_text(names)}. {self._advice}")

    def _names(self, optimizer):
        """Return the names of the parameters whose gradients were made, but not exchanged."""
        if self._steps is not None:
            step = self._steps.last_of(optimizer)
            if step is None:  # not Horovod's
                return []
            if not step.complete:  # nobody has waited for its results
                return [slot.name for slot in step.slots]
        owned = [one for group in optimizer.param_groups for one in group["params"]]
        left = list(self._added_to(optimizer, owned))
        if self._made:
            made = {key: slot for key, slot in self._made.items() if not self._may_stay(slot)}
            left += [(made[id(one)].name, one) for one in owned if id(one) in made]
        return [name for name, one in left if self._counts(one.grad)]

    def _added_to(self, optimizer, owned):
        """Return (name, parameter) of the parameters that were added too late."""
        others = [one for one in owned if self._parameters.get(one) is None]
        free = {id(one) for one in others if not any(each._parameters.get(one) for each in _all)}
        return self._find_added(optimizer, free) if free else ()

    def _counts(self, gradient):
        """Return whether a gradient would have been exchanged, and changes a parameter."""
        if gradient is None or (gradient.is_sparse and self._steps is not None):
            return False  # Horovod reduces sparse gradients without the compressor
        return has_values(gradient)


def has_values(gradient):
    """Return whether a gradient, dense or sparse, has anything but zeros."""
    return bool((gradient._values() if gradient.is_sparse else gradient).any())


_all: weakref.WeakSet = weakref.WeakSet()  # all living objects of Unexchanged


def _added_to_horovod(optimizer, free):
    """Return (name, parameter) of parameters that hvd.DistributedOptimizer was not given."""
    return [
        (f'param_groups[{i}]["params"][{j}]', parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if id(parameter) in free and parameter not in optimizer._parameter_names
    ]


def _text(names):
    return (
        f"the optimizer has used a gradient of {some_of(names)} that was not exchanged. Unless all"
        " ranks have made the same one, their models differ from now on"
    )
