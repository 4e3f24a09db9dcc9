"""Find gradients of shards with which an optimizer steps although hosts did not exchange them.

Nothing but the compressor averages between hosts. So each host trains a model of its own where a
module is not registered, or a layer is added after ``register``.
"""

import weakref

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.torch.step_listener import StepListener
from deepreduce_hvd.torch.unexchanged import has_values
from deepreduce_hvd.user_warnings import warn

_all: weakref.WeakSet = weakref.WeakSet()  # all living objects of UnexchangedShards
_named: weakref.WeakSet = weakref.WeakSet()  # optimizers that a warning was about


class UnexchangedShards(StepListener):
    """Warns once about such gradients, after a step of an optimizer.

    Plain parameters that the model has when this is created count as those of ``ignored_params=``,
    which PyTorch does not keep. The program averages their gradients itself.

    Args:
        model: weak reference to the module that is registered.
        groups: PyTorch's parameter groups that are registered.
        ranks: global numbers of the ranks of this host, between which the parameters are sharded.
        hosts: the number of hosts.
    """

    def __init__(self, model, groups, ranks, hosts):
        super().__init__()
        self._model = model
        self._groups = groups
        infos = [part._module_info for group in groups for part in group.fsdp_params]
        # after a forward pass, the module may have whole tensors in place of shards
        managed = {id(getattr(info.module, info.param_name)) for info in infos}
        self._ignored = {id(one) for one in model().parameters()} - managed
        self._ranks = list(ranks)
        self._hosts = hosts
        self._has_warned = False
        _all.add(self)

    def close(self):
        """Stop, when the compressor is closed."""
        _all.discard(self)
        self._has_warned = True

    def end_step(self, optimizer):
        """Look at the gradients with which an optimizer has stepped."""
        if self._has_warned or self._hosts == 1 or optimizer in _named:
            return
        groups = [group for one in _all for group in one._groups]
        known = {id(part.sharded_param) for group in groups for part in group.fsdp_params}
        names = [
            f'param_groups[{i}]["params"][{j}]'
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            if id(parameter) not in known and self._is_sharded_here(parameter)
        ]
        names += self._added(optimizer)
        if names:
            self._has_warned = True
            _named.add(optimizer)
            warn(
                f"the optimizer has used a gradient of {some_of(names)} that the hosts did not"
                " exchange. Unless all ranks have made the same one, their models differ from now"
                " on. register must get the module that has all sharded parameters, when all its"
                " layers are there, and before the first backward pass (docs/tutorial-fsdp.md)"
            )

    def _is_sharded_here(self, parameter):
        """Return whether a parameter has a gradient and is sharded between the same ranks."""
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim != 1:
            return False
        ranks = dist.get_process_group_ranks(gradient.device_mesh.get_group())
        return ranks == self._ranks and bool(gradient.to_local().any())

    def _added(self, optimizer):
        """Return the names of the plain parameters that have come into the model too late."""
        plain = {
            id(one)
            for group in optimizer.param_groups
            for one in group["params"]
            if id(one) not in self._ignored and _is_plain(one.grad)
        }
        model = self._model() if plain else None
        return [
            name
            for name, one in (() if model is None else model.named_parameters())
            if id(one) in plain and has_values(one.grad)
        ]


def _is_plain(gradient):
    return gradient is not None and not isinstance(gradient, DTensor)
