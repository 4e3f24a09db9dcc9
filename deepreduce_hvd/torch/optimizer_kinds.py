"""Kinds of PyTorch's optimizers: which can be prepared, and which do not suit compression."""

import torch

from deepreduce_hvd.torch.parameter_groups import inner_of, setting_of

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

#: names of optimizers that need complete gradients, also without momentum. Adafactor and Muon scale
#: a step by the whole gradient of a tensor; LBFGS and Rprop compare successive gradients.
_UNSUITABLE = ("Adafactor", "LBFGS", "Muon", "Rprop")
USE_ANOTHER = (
    "use another optimizer, such as AdamW, or send its parameters uncompressed, as"
    " Compressor('dense') does"
)

#: the code of PyTorch's wrapper around ``step``, which runs the hooks
_HOOKS_CODE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def unsuitable_name(kind):
    """Return the name of the class in ``_UNSUITABLE`` that a class of optimizers is, or None."""
    names = (one.__name__ for one in kind.__mro__)
    return next((name for name in names if name in _UNSUITABLE), None)


def without_hooks(step):
    """Return the function of a class's ``step`` that PyTorch's wrapper for hooks calls.

    The wrapper of the prepared class runs the hooks. Wrappers of others also have the attribute
    ``hooked``, which functools.wraps copies, so this one is known by its code.
    """
    while getattr(step, "__code__", None) is _HOOKS_CODE:
        step = step.__wrapped__
    return step


def is_wrapped(optimizer):
    """Return whether an optimizer is a ``hvd.DistributedOptimizer``."""
    return hasattr(optimizer, "_allreduce_delay")


def _known_kind(kind):
    """Return the class of PyTorch that a class of optimizers derives from, or None."""
    return next((one for one in kind.__mro__ if one in _KNOWN), None)


def refusal_of(optimizer):
    """Return why an optimizer cannot be prepared, because its steps are not known; else None.

    A step of its own would see other groups than the user's: copies, more of them, and in another
    order. The step of ``hvd.DistributedOptimizer`` calls that of the optimizer that it wraps.
    """
    kind = type(optimizer).__mro__[is_wrapped(optimizer)]
    kind = getattr(optimizer, "original_class", kind)  # of a prepared optimizer
    known, setting = _known_kind(kind), setting_of(optimizer.param_groups[0])
    advice = (
        "it has no momentum that is known"
        if setting is None
        else f"set {setting} to 0 for the compressed parameters"
    )
    inner = inner_of(optimizer)
    if inner is not None:
        return (
            f"expected the optimizer inside of {kind.__name__}, got {kind.__name__} itself; write"
            " dr.prepare(optimizer.optim, compressor)"
        )
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        return (
            f"expected the optimizer inside of {kind.__name__}, got {kind.__name__} itself; call"
            f" dr.prepare before {kind.__name__} is made, with Accelerate before"
            " accelerator.prepare"
        )
    if known is None and unsuitable_name(kind):
        return (
            f"expected one of {', '.join(one.__name__ for one in _KNOWN)}, got {kind.__name__},"
            f" which needs complete gradients; {USE_ANOTHER}"
        )
    if known is None:
        return (
            f"expected one of {', '.join(one.__name__ for one in _KNOWN)}, got {kind.__name__}; use"
            f" it without prepare: {advice}"
        )
    if without_hooks(kind.step) is not without_hooks(known.step):
        return (
            f"expected an optimizer with the step of torch.optim.{known.__name__}, got"
            f" {kind.__name__}, which has its own; if it wraps another optimizer, prepare that one;"
            f" otherwise use it without prepare: {advice}"
        )
    return None
