"""Warnings about optimizers that :func:`deepreduce_hvd.prepare` has not prepared."""

import numbers
import sys

import tensorflow as tf

from deepreduce_hvd.base_preparation import warning
from deepreduce_hvd.coordination.frames import frames_of
from deepreduce_hvd.tensorflow.prepare import KNOWN, is_prepared, kind_of, momentum_of

#: optimizers of tf.compat.v1 with momentum -> the attribute with it and its argument
_OF_VERSION_1 = {
    tf.compat.v1.train.MomentumOptimizer: ("_momentum", "momentum"),
    tf.compat.v1.train.RMSPropOptimizer: ("_momentum", "momentum"),
    tf.compat.v1.train.AdamOptimizer: ("_beta1", "beta1"),
}


def momentum_warning(compressor):
    """Return a warning if a Keras optimizer that reduces now has momentum, else None.

    Horovod passes only a tensor to ``compress``, so the optimizer is looked for among the callers.
    Only Horovod's frames are read. Reading a frame's local variables keeps them alive until its
    function returns, and the user's training loop does not return for long.
    """
    optimizer, reduced = optimizer_that_reduces()
    if optimizer is None:
        return None
    return warning_about(optimizer, compressor, reduced, "before hvd.DistributedOptimizer")


def optimizer_that_reduces():
    """Return Horovod's Keras optimizer among the callers, and the variables that it reduces now.

    Return None, None if there is none, as with a tape.
    """
    for frame in frames_of(sys._getframe(1)):
        of_horovod = frame.f_globals.get("__name__", "").startswith("horovod.")
        optimizer = frame.f_locals.get("self") if of_horovod else None
        is_tape = isinstance(optimizer, tf.GradientTape)
        if not is_tape and "_allreduce_grads" in getattr(optimizer, "__dict__", ()):
            return optimizer, frame.f_locals.get("vars")
    return None, None


def warning_about(optimizer, compressor, variables, when):
    """Return a warning if a Keras optimizer has momentum for delayed gradients, else None.

    Args:
        optimizer: the optimizer.
        compressor: the compressor of the gradients.
        variables: list of the variables that it updates; None for all.
        when: where to call prepare.
    """
    delayed = _stepped_with_momentum(optimizer, compressor, variables)
    if delayed and isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _warning_of_version_1(optimizer, delayed[0].memory)
    momentum = momentum_of(optimizer) if delayed else 0.0
    if not momentum:
        return None
    kind = kind_of(optimizer)
    legacy = not hasattr(optimizer, "update_step")
    known = "Adam" if kind == "Nadam" else kind  # see ``prepare``
    return warning(
        f"legacy.{kind}" if legacy else kind,
        KNOWN[kind],
        momentum,
        delayed[0].memory,
        when,
        f"tf.keras.optimizers.{known}(...)" if legacy or known != kind else "optimizer",
    )


def _warning_of_version_1(optimizer, memory):
    """Return a warning if Horovod's optimizer has one of tf.compat.v1 with momentum, else None."""
    wrapped = getattr(optimizer, "_optimizer", None)
    attribute, name = _OF_VERSION_1.get(type(wrapped), (None, None))
    momentum = getattr(wrapped, attribute) if attribute else 0.0
    if not isinstance(momentum, numbers.Real) or not momentum:
        return None
    advice = f"dr.prepare knows optimizers of Keras only: set {name} to 0"
    if name == "momentum":
        advice += f" and divide the learning rate by {1 - momentum:g}"
    return warning(type(wrapped).__name__, name, momentum, memory, "", instead=advice)


def _stepped_with_momentum(optimizer, compressor, reduced):
    """Return the policies of delayed gradients for which an optimizer is not prepared.

    Args:
        optimizer: the optimizer. It may be prepared with another compressor, which may not have
            these variables.
        compressor: the compressor of the gradients.
        reduced: list of the variables whose gradients are reduced now; None for all.
    """
    known = compressor.adapter.variables
    prepared = optimizer.preparation.compresses if is_prepared(optimizer) else lambda _: False
    delayed = []
    for variable in known.by_name().values() if reduced is None else reduced:
        slot = known.slot_of(variable)
        policy = None if slot is None else compressor.policies[slot.label]
        if policy is None or not policy.delays or prepared(variable):
            continue
        if slot.table is None or not slot.table.may_suit_momentum:
            delayed.append(policy)
    return delayed
