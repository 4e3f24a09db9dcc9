"""Parameter groups of PyTorch's optimizers: their momentum, and what replaces it."""

import torch


def suits_tables(group):
    """Return whether embedding tables of a group keep their momentum.

    Ranks load and broadcast the state of an optimizer, perhaps before they know the tables. The
    state of NAdam has the product of all momenta, which would have another value for tables.
    """
    return "momentum_decay" not in group


def factors_of_group(preparation, own, group):
    """Return the factors of the learning rate and of the weight decay of compressed parameters.

    Return None if their group is stepped as it is. ``own`` is the momentum of their memory.
    """
    return preparation.factors(
        own,
        momentum_of(group),
        dampening=group.get("dampening", 0),
        scales_learning_rate="betas" not in group,
        decays=bool(group.get("weight_decay", 0)) and not group.get("decoupled_weight_decay"),
    )


def without_momentum(group):
    """Return the settings of a group with a momentum of 0."""
    plain = dict(group)
    if "betas" in group:
        first, second = group["betas"]  # both numbers or both tensors
        plain["betas"] = first * 0, second
    elif "momentum" in group:
        plain["momentum"] = 0.0
    if "nesterov" in group:
        plain.update(nesterov=False, dampening=0.0)
    return plain


def momentum_of(group):
    """Return the momentum of a parameter group: ``momentum``, or the first of ``betas``, or 0."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0)


def setting_of(group):
    """Return the name of the momentum in a parameter group, or None if it has none."""
    if "betas" in group:
        return "betas[0]"
    return "momentum" if "momentum" in group else None


def inner_of(optimizer):
    """Return the optimizer that ZeroRedundancyOptimizer and its like have inside, or None."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None
