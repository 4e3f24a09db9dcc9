"""Prepare a PyTorch optimizer for error feedback: see :func:`deepreduce_hvd.prepare`."""

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from deepreduce_hvd.base_preparation import (
    Preparation,
    expect_one_compressor,
    momentum_in_use,
    undo,
)
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.optimizer_kinds import is_wrapped, refusal_of, without_hooks
from deepreduce_hvd.torch.parameter_groups import (
    factors_of_group,
    momentum_of,
    setting_of,
    suits_tables,
    without_momentum,
)
from deepreduce_hvd.torch.slot import Slot
from deepreduce_hvd.torch.unattached import warn_if_unused

# For type checkers, the mixin derives from the class that it is combined with at run time.
if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer
else:
    _Optimizer = object


class _Prepared(_Optimizer):
    """Mixin: compressed parameters are stepped without momentum.

    The groups that the user, closures, hooks, learning rate schedulers and checkpoints see do not
    change. While the original class steps, the optimizer has other groups. This also works inside
    ``hvd.DistributedOptimizer``, which makes a subclass of the optimizer's class.
    """

    preparation: Preparation
    #: parameter -> its slot in the compressor when the optimizer was prepared
    slots: ClassVar[dict[torch.Tensor, Slot]]
    original_class: type[torch.optim.Optimizer]
    #: whether Horovod may broadcast the state
    keeps_a_state: bool
    #: whether it has stepped without momentum; not if the program calls a ``step`` of before
    has_stepped = False

    # torch.compile would keep the groups of the first step
    @torch._disable_dynamo
    def step(self, closure=None):
        loss = None
        self.has_stepped = True
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.preparation.checked:
            warn_if_unused(self)
        groups = self.param_groups
        self.param_groups = [part for group in groups for part in self._split(group)]
        try:
            without_hooks(self.original_class.step)(self)
        finally:
            self.param_groups = groups
        self._keep_zeros()
        self._keep_a_state()
        return loss

    def _keep_zeros(self):
        """Keep zeros as the momentum of parameters that are stepped without one.

        RMSprop expects a momentum of each parameter if the run goes on without prepare. With SGD,
        embedding tables have one. Which parameters are tables may be known on some ranks only, so
        all others that may be tables have zeros, see :meth:`drop_momenta`.
        """
        if not isinstance(self, (torch.optim.SGD, torch.optim.RMSprop)):
            return
        # not an attribute of the class: hvd.DistributedOptimizer begins with an empty state
        before, self._zeros = vars(self).get("_zeros", {}), {}
        for parameter in self.stepped_without_momentum():
            if not isinstance(self, torch.optim.RMSprop) and not self._is_candidate(parameter):
                continue
            zeros = before.get(parameter)
            if parameter.grad is not None:
                state = self.state[parameter]
                # anything else was loaded, or is of steps with momentum
                if zeros is None or state.get("momentum_buffer") is not zeros:
                    state["momentum_buffer"] = zeros = torch.zeros_like(parameter)
            if zeros is not None:
                self._zeros[parameter] = zeros

    def _keep_a_state(self):
        """Keep an entry in the state of SGD if all of its momenta are dropped.

        hvd.broadcast_optimizer_state broadcasts neither learning rates nor other settings if the
        state is empty. PyTorch's SGD takes None for a momentum that has not begun.
        """
        if self.state or not self.keeps_a_state or not isinstance(self, torch.optim.SGD):
            return
        for parameter in self.stepped_without_momentum()[:1]:
            self.state[parameter]["momentum_buffer"] = None

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.drop_momenta()

    def drop_momenta(self):
        """Drop the momenta of SGD that are not used, as if this optimizer had made all steps.

        hvd.broadcast_optimizer_state expects the same state on all ranks, and only rank 0 may load
        one, before or after it prepares the optimizer. On the others, Horovod makes a step of
        zeros. All parameters have a momentum then, except those whose momenta are dropped. So those
        without one get zeros here. Parameters that may be embedding tables keep what they have.
        """
        if not isinstance(self, torch.optim.SGD) or not self.state:
            return
        dropped = {one for one in self.stepped_without_momentum() if not self._is_candidate(one)}
        for parameter in dropped:
            state = self.state.get(parameter, {})
            state.pop("momentum_buffer", None)
            if not state:
                self.state.pop(parameter, None)
        for group in self.param_groups if self.keeps_a_state else ():
            for parameter in group["params"] if momentum_of(group) else ():
                if parameter.requires_grad and parameter not in dropped:
                    state = self.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
        self._keep_a_state()

    def _is_candidate(self, parameter):
        """Return whether a parameter may be an embedding table, the same on all ranks."""
        slot = self.slots.get(parameter)
        return slot is not None and slot.name in self.preparation.compressor.table_candidates

    def __reduce_ex__(self, protocol):
        """Refuse to pickle: the class is made at run time, and parameters in a file are copies."""
        raise InvalidArgumentError(
            f"pickle or torch.save: expected the state of a prepared {type(self).__name__}, got the"
            " optimizer itself; save optimizer.state_dict(), and load it into an optimizer that"
            " dr.prepare has prepared, or call dr.prepare(optimizer, None) before"
        )

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__())
        return copied

    def __deepcopy__(self, memo):
        """Return a copy that is prepared for the copies of the parameters."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if is_wrapped(self):
            return copied
        preparation = copy.copy(self.preparation)
        policies, slots = {}, {}
        for group, copies in zip(self.param_groups, copied.param_groups):
            for parameter, own in zip(group["params"], copies["params"]):
                if parameter in self.slots:
                    policies[own] = self.preparation.policy_of(parameter)
                    slots[own] = self.slots[parameter]
        preparation.policy_of = policies.get
        copied.__class__ = _prepared_class(
            self.original_class, preparation, slots, self.keeps_a_state
        )
        return copied

    def stepped_without_momentum(self):
        """Return the parameters whose momentum is replaced."""
        return [
            parameter
            for group in self.param_groups
            if momentum_of(group)
            for parameter in group["params"]
            if self._compresses(parameter, group)
        ]

    def _compresses(self, parameter, group):
        """Return whether a parameter is stepped without momentum.

        It is if parts of its gradients are sent in later steps. Sparse gradients that are not made
        dense are summed by Horovod itself, in full. Nothing of an embedding table is delayed
        either, so it keeps its momentum, but not in all optimizers, see
        :func:`~deepreduce_hvd.torch.parameter_groups.suits_tables`.
        """
        if not self.preparation.compresses(parameter):
            return False
        slot = self._slot_of(parameter)
        if suits_tables(group) and self._is_or_may_be_table(parameter, slot, group):
            return False
        if slot.steps != slot.untimed_steps:
            return slot.uncompressed_path != "sparse"
        # one process alone exchanges nothing
        gradient = parameter.grad
        sparse = gradient is not None and gradient.is_sparse
        return not sparse or getattr(self, "sparse_as_dense", False)

    def _slot_of(self, parameter):
        """Return the slot that knows how a parameter's gradients are sent."""
        slot = self.slots[parameter]
        return slot.successor or slot

    def _is_or_may_be_table(self, parameter, slot, group):
        """Return whether a parameter is to be stepped as an embedding table.

        It may not be known as long as all gradients were zero, or only one was not. A job that
        exchanges none never knows. Then Adam steps it as a table. A first step with momentum is the
        same as one without: its bias correction makes up for the factor of the gradient. SGD and
        RMSprop step it as another layer: without momentum, and as far as the gradient would move it
        in all steps with momentum.
        """
        if slot.is_table is not None:
            return slot.is_table
        adapter = self.preparation.compressor.adapter
        may_be = "betas" in group and self._is_candidate(parameter)
        return may_be and not adapter.sends_nothing(slot)

    def _split(self, group):
        """Return the groups to step in place of ``group``: those that change, and the rest."""
        # memories with a momentum of their own have other factors
        factors_of: dict[float, tuple[float, float] | None] = {}
        by_factors: dict[tuple[float, float], list] = {}
        rest = []
        adapter = self.preparation.compressor.adapter
        for parameter in group["params"]:
            factors = None
            if self._compresses(parameter, group):
                memory = self.preparation.policy_of(parameter).memory
                own = momentum_in_use(adapter, self._slot_of(parameter), memory)
                if own not in factors_of:
                    factors_of[own] = factors_of_group(self.preparation, own, group)
                factors = factors_of[own]
            if factors is None:
                rest.append(parameter)
            else:
                by_factors.setdefault(factors, []).append(parameter)
        if not by_factors:
            return [group]
        plain = without_momentum(group)
        stepped = []
        for (rate, decay), own in by_factors.items():
            stepped.append({**plain, "params": own})
            if rate != 1:
                stepped[-1]["lr"] = group["lr"] * rate
            if decay != 1:
                stepped[-1]["weight_decay"] = group["weight_decay"] * decay
        return [*stepped, *([{**group, "params": rest}] if rest else [])]


def is_prepared(optimizer):
    """Return whether compressed parameters of this optimizer are stepped without momentum."""
    return isinstance(optimizer, _Prepared)


def slots_of(compressor):
    """Return {parameter: its slot}."""
    return {slot.parameter: slot for slot in compressor.adapter.slots.values()}


def _expect_own_parameters(optimizer, compressor):
    """Raise InvalidArgumentError if ``compressor`` is not the one of the optimizer's parameters."""
    known = {slot.parameter for slot in compressor.adapter.slots.values()}
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not stepped & known:
        raise InvalidArgumentError(
            "prepare: expected an optimizer of the compressor's parameters, got one that has none"
            " of them; with fully_shard, create the compressor and the optimizer after it and after"
            " loading that replaces parameters"
        )
    if not is_prepared(optimizer):
        return
    left = [
        slot.name
        for parameter, slot in optimizer.slots.items()
        if parameter in stepped - known and slot.state  # a closed compressor has no memories
    ]
    expect_one_compressor(left)


def prepare(optimizer, compressor):
    """Implement :func:`deepreduce_hvd.prepare` for a ``torch.optim.Optimizer``."""
    if compressor is not None:
        _expect_own_parameters(optimizer, compressor)
    if "step" in vars(optimizer):
        raise InvalidArgumentError(
            "prepare: expected an optimizer without a learning rate scheduler, got one whose step "
            "a scheduler watches; create schedulers after prepare"
        )
    undo(optimizer, is_prepared(optimizer), wrapped=is_wrapped(optimizer))
    vars(optimizer).pop("_zeros", None)  # a plain optimizer would write to them
    if compressor is None:
        return None
    refusal = refusal_of(optimizer)
    if refusal is not None:
        raise InvalidArgumentError(f"prepare: {refusal}")
    original = type(optimizer)
    slots = slots_of(compressor)
    policies = {one: compressor.first_policies[slot.name] for one, slot in slots.items()}
    preparation = Preparation(
        compressor,
        policies.get,
        normalizes=issubclass(original, torch.optim.RMSprop),
        decouples=issubclass(original, torch.optim.AdamW),
    )
    changes = preparation.describe(
        original.__name__,
        setting_of(optimizer.defaults) or "momentum",
        [
            (
                momentum_of(group),
                factors_of_group(
                    preparation,
                    momentum_in_use(
                        compressor.adapter, slots[parameter], policies[parameter].memory
                    ),
                    group,
                )
                if preparation.compresses(parameter)
                else None,
            )
            for group in optimizer.param_groups
            for parameter in group["params"]
        ],
        with_hint="betas" in optimizer.defaults,
    )
    uses_horovod = hasattr(compressor.adapter.transport, "horovod")
    optimizer.__class__ = _prepared_class(original, preparation, slots, uses_horovod)
    optimizer.drop_momenta()
    return changes


def _prepared_class(original, preparation, slots, keeps_a_state):
    """Return the class of an optimizer of class ``original`` that is prepared.

    The further arguments are attributes of :class:`_Prepared`.
    """
    step: Any = original.profile_hook_step(_Prepared.step)
    step.hooked = True
    return type(
        original.__name__,
        (_Prepared, original),
        {
            "preparation": preparation,
            "slots": slots,
            "original_class": original,
            "keeps_a_state": keeps_a_state,
            "step": step,
            "__module__": original.__module__,
        },
    )
