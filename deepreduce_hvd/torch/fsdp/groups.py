"""The parameter groups of fully_shard, and where their shards are in a reduced buffer.

PyTorch's all-reduce hook gets only the buffer: the shards of all parameters that have a gradient,
one after another, each padded to the size of the first rank's shard. The list of these parameters
is a local variable of the function that calls the hook.
"""

import inspect
import sys

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointFunction

from deepreduce_hvd.communicators.wire import AVERAGE, SUM
from deepreduce_hvd.coordination.frames import frames_of
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.slot import Slot

#: the local variables of the hook's caller that have the parameters, and the number by which it
#: divides the buffer after the hook (None for 1)
_PARAMETERS = "fsdp_params"
_DIVISOR = "postdivide_factor"
#: PyTorch divides buffers of other dtypes after the hook
_DIVIDED_BEFORE = (torch.float32, torch.bfloat16)


class ShardSlot(Slot):
    """State of this rank's shard of one parameter.

    Args:
        slot: slot of the whole parameter, which this one replaces.
        fsdp_parameter: PyTorch's description of the sharded parameter.
        group: PyTorch's parameter group.

    Attributes:
        divided_after: the number by which PyTorch divides the averages after the hook, which gives
            the units of the memory; None before the first step.
    """

    def __init__(self, slot, fsdp_parameter, group):
        self._group = group
        self._shape = fsdp_parameter.sharded_size
        self.divided_after = None
        self.dim = fsdp_parameter.fsdp_placement.dim
        super().__init__(slot.name, slot.parameter, slot.key, slot.policy, slot.follows_loss_scale)

    @property
    def shape(self):
        return self._shape

    @property
    def is_divided_after(self):
        """Whether PyTorch may divide the averages after the hook; known before the first step."""
        policy = self._group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or self.parameter.dtype
        return self._group.force_sum_reduction_for_comms or dtype not in _DIVIDED_BEFORE

    def follow_division(self, divisor):
        """Rescale the memory when PyTorch divides the averages by another number after the hook.

        That number depends on the number of shards, which a loaded state may not have had.
        """
        if self.divided_after not in (None, divisor):
            self.settle()
            for part in (*self.state, *self.backup):
                part.mul_(divisor / self.divided_after)
        self.divided_after = divisor


class ParameterGroup:
    """One parameter group of fully_shard.

    Args:
        group: PyTorch's group.
        slots: {id of a sharded parameter: its slot}, of all parameters of the compressor.

    Attributes:
        of_pytorch: that group.
        slots: slots of its parameters, :class:`ShardSlot`.
        divided_after: the number by which PyTorch divides the buffer after this hook.
    """

    def __init__(self, group, slots):
        self.of_pytorch = group
        self.divided_after = 1.0
        self._by_parameter = {
            id(one): ShardSlot(slots[id(one.sharded_param)], one, group)
            for one in group.fsdp_params
            if id(one.sharded_param) in slots
        }
        self.slots = list(self._by_parameter.values())
        self._partial = None  # parameters and sum of buffers that were not exchanged

    @property
    def unused_have_gradients(self):
        """Whether parameters that backward did not use get gradients of zeros."""
        return self.of_pytorch.reduce_scatter_unused_params

    @property
    def exchanges(self):
        """Whether this backward pass exchanges gradients, or keeps them for a later one."""
        return self.of_pytorch.all_reduce_grads

    @property
    def divisor(self):
        """The number by which the sums between hosts are divided; None for that of the hosts.

        A divisor set by the user applies to the sum over all ranks. PyTorch has applied it already.
        """
        return None if self.of_pytorch.gradient_divide_factor is None else 1

    def expect_registered_parameters(self):
        """Raise InvalidArgumentError if the module has got other parameters since ``register``."""
        for one in self.of_pytorch.fsdp_params:
            slot = self._by_parameter.get(id(one))
            if slot is not None and slot.parameter is not one.sharded_param:
                raise InvalidArgumentError(
                    f"fully_shard: expected the parameters of register(), got another {slot.name},"
                    " as after load_state_dict(assign=True) or loading into a model on the meta"
                    " device; load before you create the compressor"
                )

    def shards(self, parameters, buffer, loss_scale):
        """Return the slots of the shards to exchange, and views of their gradients in the buffer.

        Shards without elements are left out; their steps are counted here.

        Args:
            parameters: PyTorch's descriptions of the parameters whose shards are in the buffer.
            buffer: (n,) tensor.
            loss_scale: loss scale of this step, or None.
        """
        if self._is_postponed(parameters, buffer):
            return [], []
        sizes = [one.padded_sharded_param_size.numel() for one in parameters]
        if sum(sizes) != buffer.numel():
            raise InvalidArgumentError(
                f"fully_shard: expected {sum(sizes)} elements of {len(sizes)} shards, got "
                f"{buffer.numel()}; this PyTorch {torch.__version__} lays them out in another way"
            )
        slots, gradients = [], []
        for one, part in zip(parameters, buffer.split(sizes)):
            slot = self._by_parameter.get(id(one))
            if slot is None:
                raise InvalidArgumentError(
                    "fully_shard: expected gradients of named parameters, got one of"
                    f" {one._param_fqn}; create the compressor with"
                    " parameters=network.named_parameters()"
                )
            slot.reduction = AVERAGE if self.divisor is None else SUM
            slot.follow_division(self.divided_after)
            if not slot.shape.numel():
                slot.steps += 1
                if slot.state or not slot.dense:  # as for other shards
                    slot.follow_loss_scale(loss_scale)
                continue
            slots.append(slot)
            gradients.append(part[: slot.shape.numel()].view(slot.shape))
            slot.made = not self.unused_have_gradients
        return slots, gradients

    def _is_postponed(self, parameters, buffer):
        """Add kept buffers to this one; return whether it is also kept, for a later backward pass.

        As in PyTorch's own hybrid sharding, ``set_requires_all_reduce(False)`` postpones the
        exchange.
        """
        earlier, self._partial = self._partial, None
        if earlier is not None:
            if earlier[0] != parameters:
                raise InvalidArgumentError(
                    "set_requires_all_reduce(False): expected gradients of the same parameters in"
                    " each backward pass, got others; use set_requires_gradient_sync(False)"
                )
            buffer += earlier[1]
        if self.exchanges:
            return False
        self._partial = parameters, buffer.clone()
        buffer.zero_()
        return True

    def may_come_late(self, parameters, buffer):
        """Return whether the result may come after the hook, until the end of the backward pass.

        This is so if PyTorch makes the gradients views of the buffer and does nothing else with it.
        """
        group = self.of_pytorch
        return (
            buffer.dtype == group._orig_dtype
            and buffer.dtype in _DIVIDED_BEFORE
            and not group.force_sum_reduction_for_comms
            and not any(
                one.sharded_param.grad is not None or one.sharded_param._post_accumulate_grad_hooks
                for one in parameters
            )
        )


def values_of_caller():
    """Return what PyTorch does not give to the all-reduce hook, which calls this.

    Returns:
        A tuple (parameters whose shards are in the buffer, number by which PyTorch divides the
        buffer after the hook).
    """
    values = sys._getframe(2).f_locals
    return list(values[_PARAMETERS]), values[_DIVISOR] or 1.0


def expect_no_pass_within_another():
    """Raise InvalidArgumentError in a backward pass that a checkpoint runs within another one.

    A step is one backward pass, and nothing tells when the outer pass of such a pass ends.
    """
    reentrant = CheckpointFunction.backward.__code__
    if any(one.f_code is reentrant for one in frames_of(sys._getframe(1))):
        raise InvalidArgumentError(
            "fully_shard: expected torch.utils.checkpoint.checkpoint with use_reentrant=False, got"
            " use_reentrant=True around a module after fully_shard"
        )


def modules_and_groups(model):
    """Return (module, PyTorch's parameter group) for each group of a model.

    Raises:
        InvalidArgumentError: fully_shard cannot be used in this way, or not in this PyTorch.
    """
    _check_pytorch()
    found: dict[int, tuple] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", None)
        if groups is None:
            raise _other_pytorch()
        if len(groups) > 1:
            raise InvalidArgumentError(
                "register: expected one mesh for all parameters of a module, got several from "
                f"shard_placement_fn in {type(module).__name__}"
            )
        for group in groups:
            found.setdefault(id(group), (module, group))
    return list(found.values())


def _check_pytorch():
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        code = inspect.unwrap(_fsdp_collectives.foreach_reduce).__code__
        known = set(code.co_varnames)
    except (ImportError, AttributeError):
        known = set()
    if not known.issuperset((_PARAMETERS, _DIVISOR, "all_reduce_hook")):
        raise _other_pytorch()


def _other_pytorch():
    return InvalidArgumentError(
        "register: expected a PyTorch whose fully_shard has an all-reduce hook as in 2.13, got"
        f" {torch.__version__}"
    )
