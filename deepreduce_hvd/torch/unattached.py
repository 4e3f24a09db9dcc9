"""A compressor that does not communicate yet: Horovod is missing or not in use."""

import importlib.util

import torch
import torch.distributed as dist

from deepreduce_hvd.adapters.base_adapter import BaseAdapter
from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.torch.parameters import make_slots
from deepreduce_hvd.torch.step_listener import StepListener
from deepreduce_hvd.user_warnings import warn


class _NoTransport(Transport):
    """The transport of a process that has no peers yet."""

    process_set = None
    size = local_size = 1

    @property
    def rank(self):  # type: ignore[override]  # torch.distributed may begin later
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class UnattachedAdapter(BaseAdapter, StepListener):
    """Keep the slots of the parameters until ``Compressor.register`` finds the other ranks.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        named: list of its (name, parameter) pairs.
    """

    def __init__(self, compressor, named):
        super().__init__(compressor, _NoTransport())
        self.slots = make_slots(compressor, named, lambda parameter: torch.device("cpu"))
        self._has_warned = False
        StepListener.__init__(self)

    @staticmethod
    def _refuse(what):
        raise InvalidArgumentError(
            f"{what}: expected an initialized Horovod or a registered model, got neither; in "
            "PyTorch's DDP call register(ddp_model) first, after fully_shard register(module,"
            ' mesh["hosts"])' + _advice_on_horovod()
        )

    def compress(self, tensor):
        self._refuse("compress")

    def decompress(self, tensor, context):
        self._refuse("decompress")

    def state_dict(self):
        self._refuse("state_dict")

    def load_state_dict(self, state):
        self._refuse("load_state_dict")

    def profile(self):
        self._refuse("profile")

    def timeline(self, path):
        self._refuse("timeline")

    def unregistered(self):
        return unregistered()

    def close_steps(self):
        """Do nothing: there are no steps."""

    def forget_steps(self):
        """Do nothing: there are no steps."""

    def end_step(self, optimizer):
        """Warn once if an optimizer has stepped parameters that are sharded within hosts.

        DDP averages gradients all the same, but after ``fully_shard`` nothing else averages between
        hosts.
        """
        is_in_use = self.compressor.adapter is self and not self._has_warned
        why = unregistered() if is_in_use else None
        if why is None:
            return
        names = {slot.parameter: name for name, slot in self.slots.items()}
        stepped = [
            names[one]
            for group in optimizer.param_groups
            for one in group["params"]
            if one in names and _is_of_this_host_only(one.grad)
        ]
        if stepped:
            self._has_warned = True
            warn(
                f"the optimizer has used a gradient of {some_of(stepped)} that the hosts did not"
                f" exchange, so their models differ from now on: {why}"
            )


def _is_of_this_host_only(gradient):
    """Return whether a gradient is sharded between some of the ranks, and is not zero."""
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None or mesh.size() == dist.get_world_size():
        return False
    return bool(gradient.to_local().any())


def unregistered():
    """Return what to do if torch.distributed has several ranks; otherwise None."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return None
    return (
        f"torch.distributed has {ranks} ranks, but the compressor is not registered with a model;"
        ' call register(ddp_model), or after fully_shard register(module, mesh["hosts"])'
    )


def warn_if_unused(optimizer):
    """Warn in the first step of a prepared optimizer if its gradients did not reach the compressor.

    A step without gradients, or with sparse ones only, says nothing, nor does one with zeros:
    hvd.broadcast_optimizer_state makes such a step, to create the state of an optimizer.
    """
    slots, zeros = [], True
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot, gradient = optimizer.slots.get(parameter), parameter.grad
            if slot is not None and gradient is not None and not gradient.is_sparse:
                slots.append(slot)
                zeros = zeros and not bool(gradient.any())
    if zeros:
        return
    optimizer.preparation.checked = True
    why = optimizer.preparation.compressor.adapter.why_unused(slots)
    if why is not None:
        warn(
            f"{optimizer.original_class.__name__} steps parameters whose gradients"
            f" did not reach the compressor that it is prepared for: {why}"
        )


def _advice_on_horovod():
    if dist.is_available() and dist.is_initialized():
        return ""
    if importlib.util.find_spec("horovod") is None:
        return "; for Horovod install it"
    return "; for Horovod call hvd.init() before creating the compressor"
