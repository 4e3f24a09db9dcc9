"""Prepare a PyTorch optimizer for error feedback: see :func:`deepreduce_hvd.prepare`."""

import copy
from typing import TYPE_CHECKING, Any

import torch

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.preparation import Preparation, undo, warning

#: optimizers whose groups have ``momentum`` or ``betas``, or whose update has no momentum
_KNOWN = (
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)

#: the code of PyTorch's wrapper around ``step``, which runs the hooks
_HOOKS_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


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
    original_class: type[torch.optim.Optimizer]

    # torch.compile would keep the groups of the first step
    @torch._disable_dynamo
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        self.param_groups = [part for group in groups for part in _split(group, self.preparation)]
        try:
            _without_hooks(self.original_class.step)(self)
        finally:
            self.param_groups = groups
        if isinstance(self, torch.optim.RMSprop):
            for parameter in self._stepped_without_momentum():
                state = self.state.get(parameter)
                if state and "momentum_buffer" not in state:
                    # RMSprop expects it if the run goes on without prepare
                    state["momentum_buffer"] = torch.zeros_like(parameter)
        return loss

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.drop_momenta()

    def drop_momenta(self):
        """Drop the momenta of SGD that are not used, as if this optimizer had made all steps.

        hvd.broadcast_optimizer_state expects the same state on all ranks, and only rank 0 may load
        one, before or after it prepares the optimizer.
        """
        if not isinstance(self, torch.optim.SGD):
            return
        for parameter in self._stepped_without_momentum():
            state = self.state.get(parameter, {})
            state.pop("momentum_buffer", None)
            if not state:
                self.state.pop(parameter, None)

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__())
        return copied

    def __deepcopy__(self, memo):
        """Return a copy that is prepared for the copies of the parameters."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if _is_wrapped(self):
            return copied
        preparation = copy.copy(self.preparation)
        policies = {}
        for group, copies in zip(self.param_groups, copied.param_groups):
            for parameter, own in zip(group["params"], copies["params"]):
                policies[own] = self.preparation.policy_of(parameter)
        preparation.policy_of = policies.get
        copied.__class__ = _prepared_class(self.original_class, preparation)
        return copied

    def _stepped_without_momentum(self):
        """Return the parameters whose momentum is replaced."""
        return [
            parameter
            for group in self.param_groups
            if momentum_of(group)
            for parameter in group["params"]
            if self.preparation.compresses(parameter)
        ]


def _without_hooks(step):
    """Return the function of a class's ``step`` that PyTorch's wrapper for hooks calls.

    The wrapper of the prepared class runs the hooks. Wrappers of others also have the attribute
    ``hooked``, which functools.wraps copies, so this one is known by its code.
    """
    while getattr(step, "__code__", None) is _HOOKS_CODE:
        step = step.__wrapped__
    return step


def _split(group, preparation):
    """Return the groups to step in place of ``group``: those without momentum, and the rest."""
    change = momentum_of(group)
    compressed = [p for p in group["params"] if preparation.compresses(p)] if change else []
    if not compressed:
        return [group]
    rest = [p for p in group["params"] if not preparation.compresses(p)]
    parts = [{**group, "params": rest}] if rest else []
    # memories with a momentum of their own have other factors
    by_factors: dict[tuple[float, float], list] = {}
    for parameter in compressed:
        policy, rate = preparation.policy_of(parameter), 1.0
        if "betas" not in group:
            rate = preparation.learning_rate_factor(policy, change, group.get("dampening", 0))
        decay = preparation.weight_decay_factor(policy, group.get("decoupled_weight_decay"))
        by_factors.setdefault((rate, decay), []).append(parameter)
    plain = dict(group)
    if "betas" in group:
        first, second = group["betas"]  # both numbers or both tensors
        plain["betas"] = first * 0, second
    else:
        plain["momentum"] = 0.0
    if "nesterov" in group:
        plain.update(nesterov=False, dampening=0.0)
    stepped = []
    for (rate, decay), own in by_factors.items():
        stepped.append({**plain, "params": own})
        if rate != 1:
            stepped[-1]["lr"] = group["lr"] * rate
        if decay != 1:
            stepped[-1]["weight_decay"] = group["weight_decay"] * decay
    return [*stepped, *parts]


def momentum_of(group):
    """Return the momentum of a parameter group: ``momentum``, or the first of ``betas``, or 0."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0)


def is_prepared(optimizer):
    """Return whether compressed parameters of this optimizer are stepped without momentum."""
    return isinstance(optimizer, _Prepared)


def _is_wrapped(optimizer):
    """Return whether an optimizer is a ``hvd.DistributedOptimizer``."""
    return hasattr(optimizer, "_allreduce_delay")


def _policies(compressor):
    """Return {parameter: its policy}."""
    slots = compressor.adapter.slots
    return {slot.parameter: compressor.policies[name] for name, slot in slots.items()}


def momentum_warning(optimizer, compressor):
    """Return a warning if an optimizer steps delayed gradients with momentum, else None.

    One that was prepared with another compressor may not know the parameters of this one.
    """
    prepared = optimizer.preparation.compresses if is_prepared(optimizer) else lambda _: False
    groups = [group for group in optimizer.param_groups if momentum_of(group)]
    policies = _policies(compressor) if groups else {}
    for group in groups:
        for parameter in group["params"]:
            policy = policies.get(parameter)
            if policy is not None and policy.delays and not prepared(parameter):
                name = "betas[0]" if "betas" in group else "momentum"
                return warning(type(optimizer).__name__, name, momentum_of(group), policy.memory)
    return None


def _known_kind(kind):
    """Return the class of PyTorch that a class of optimizers derives from, or None."""
    return next((one for one in kind.__mro__ if one in _KNOWN), None)


def _expect_known(optimizer):
    """Raise InvalidArgumentError for an optimizer whose steps are not known.

    A step of its own would see other groups than the user's: copies, more of them, and in another
    order.
    """
    kind = type(optimizer)
    known = _known_kind(kind)
    if known is None:
        raise InvalidArgumentError(
            f"prepare: expected one of {', '.join(one.__name__ for one in _KNOWN)}, got "
            f"{kind.__name__}; use it without prepare, and if it has momentum, set that to 0 for"
            " the compressed parameters"
        )
    if _without_hooks(kind.step) is not _without_hooks(known.step):
        raise InvalidArgumentError(
            f"prepare: expected an optimizer with the step of torch.optim.{known.__name__}, got"
            f" {kind.__name__}, which has its own; prepare the {known.__name__} that it wraps, or"
            " use it without prepare and set its momentum to 0 for the compressed parameters"
        )


def prepare(optimizer, compressor):
    """Implement :func:`deepreduce_hvd.prepare` for a ``torch.optim.Optimizer``."""
    if "step" in vars(optimizer):
        raise InvalidArgumentError(
            "prepare: expected an optimizer without a learning rate scheduler, got one whose step "
            "a scheduler watches; create schedulers after prepare"
        )
    undo(optimizer, is_prepared(optimizer), wrapped=_is_wrapped(optimizer))
    if compressor is None:
        return None
    _expect_known(optimizer)
    original = type(optimizer)
    policies = _policies(compressor)
    preparation = Preparation(
        compressor,
        policies.get,
        normalizes=issubclass(original, torch.optim.RMSprop),
        decouples=issubclass(original, torch.optim.AdamW),
    )
    changes = preparation.describe(
        original.__name__,
        "betas[0]" if "betas" in optimizer.defaults else "momentum",
        [
            (
                momentum_of(group),
                group.get("dampening", 0),
                list(map(preparation.policy_of, group["params"])),
            )
            for group in optimizer.param_groups
        ],
        scales_learning_rate="betas" not in optimizer.defaults,
    )
    optimizer.__class__ = _prepared_class(original, preparation)
    optimizer.drop_momenta()
    return changes


def _prepared_class(original, preparation):
    """Return the class of an optimizer of class ``original`` that is prepared."""
    step: Any = original.profile_hook_step(_Prepared.step)
    step.hooked = True
    return type(
        original.__name__,
        (_Prepared, original),
        {
            "preparation": preparation,
            "original_class": original,
            "step": step,
            "__module__": original.__module__,
        },
    )
