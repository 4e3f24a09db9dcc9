"""Warnings about PyTorch optimizers whose steps :func:`deepreduce_hvd.prepare` does not change."""

from deepreduce_hvd.base_preparation import warning
from deepreduce_hvd.torch.optimizer_kinds import USE_ANOTHER, refusal_of, unsuitable_name
from deepreduce_hvd.torch.parameter_groups import inner_of, momentum_of, setting_of
from deepreduce_hvd.torch.prepare import is_prepared, slots_of


def momentum_warning(
    optimizer, compressor, when="before hvd.DistributedOptimizer", is_exempt=lambda slot: False
):
    """Return a warning if an optimizer does not suit the delayed gradients that it steps.

    It does not if it has momentum, or if it needs complete gradients. Frozen
    parameters and embedding tables do not count. Return None if there is nothing to warn of.

    Args:
        optimizer: the optimizer. One that was prepared with another compressor may not know the
            parameters of this one.
        compressor: the compressor of the gradients.
        when: where to call prepare.
        is_exempt: function of a slot that tells whether it does not count either.
    """
    optimizer = inner_of(optimizer) or optimizer
    prepared = optimizer.preparation.compresses if is_prepared(optimizer) else lambda _: False
    unsuitable = unsuitable_name(type(optimizer))
    groups = [group for group in optimizer.param_groups if unsuitable or momentum_of(group)]
    slots = slots_of(compressor) if groups else {}
    for group in groups:
        for parameter in group["params"]:
            slot = slots.get(parameter) if parameter.requires_grad else None
            if slot is None or slot.is_table or is_exempt(slot) or prepared(parameter):
                continue
            policy = compressor.first_policies[slot.name]
            if policy.delays and unsuitable:
                return (
                    f"{unsuitable} needs complete gradients, but of those of compressed parameters"
                    f" only a part is sent in each step, which costs accuracy; {USE_ANOTHER}"
                )
            if policy.delays:
                name, momentum = setting_of(group), momentum_of(group)
                instead = None if refusal_of(optimizer) is None else f"set {name} to 0 for them"
                return warning(
                    type(optimizer).__name__, name, momentum, policy.memory, when, instead=instead
                )
    return None


def bypass_warning(optimizer):
    """Return a warning if an optimizer has stepped as if it were not prepared, else None.

    A wrapper, such as Accelerate's with a GradScaler, may keep the ``step`` of the time when it was
    made. PyTorch's hooks see that step too.
    """
    if not is_prepared(optimizer) or optimizer.has_stepped:
        return None
    if not optimizer.stepped_without_momentum():
        return None
    return (
        f"{type(optimizer).__name__} is prepared, but the step that it had before dr.prepare is"
        " called, so nothing has changed; call dr.prepare before accelerator.prepare of Accelerate,"
        " and before anything else that keeps optimizer.step"
    )
