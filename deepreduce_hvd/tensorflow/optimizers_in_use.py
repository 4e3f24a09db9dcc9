"""Keras optimizers that update a compressor's variables, but do not reduce their gradients.

If a tape reduces, the optimizer is not among the callers of ``compress``. So it is looked for among
all objects of the process, once. It has its variables after its first step.
"""

import gc
import sys

import tensorflow as tf

from deepreduce_hvd.tensorflow.graph import is_exported
from deepreduce_hvd.tensorflow.unprepared import optimizer_that_reduces, warning_about
from deepreduce_hvd.tensorflow.void_steps import missing_scale
from deepreduce_hvd.user_warnings import warn

_WHEN = "before the training step is traced"


class OptimizersInUse:
    """The search for the optimizers of one compressor.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._slot = None  # the first one with a memory; the search is in its second step
        self._step = 0
        self._done = False

    def look_for(self, slot, step):
        """Look for the optimizers in the second step of this process.

        Args:
            slot: slot of the gradient that is compressed.
            step: its step counter before this step, a tensor.

        Returns:
            List of tensors that must be computed before the memory is used.
        """
        if self._done or not slot.state or not tf.compat.v1.executing_eagerly_outside_functions():
            return []
        if is_exported() or optimizer_that_reduces()[0] is not None:  # that one is known
            return []
        if self._slot is None:
            with tf.init_scope():
                self._slot, self._step = slot, slot.steps + 1
        if slot is not self._slot:
            return []
        if tf.executing_eagerly():
            if int(step) >= self._step:
                self._look()
            return []
        is_due = tf.equal(step, self._step)
        found = tf.cond(
            is_due, lambda: tf.numpy_function(self._look, [], tf.bool), lambda: tf.constant(True)
        )
        return [tf.ensure_shape(found, [])]

    def _look(self):
        """Warn of momentum, and raise InvalidArgumentError if a loss scale is not known."""
        if self._done:
            return True
        self._done = True
        adapter = self._adapter
        for optimizer in _optimizers():
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            own = [one for one in adapter.variables.by_name().values() if _updates(inner, one)]
            if not own:
                continue
            scales = getattr(optimizer, "dynamic", False) or hasattr(optimizer, "dynamic_scale")
            if scales and not adapter.void_steps.active:
                raise missing_scale(optimizer, self._slot)
            message = warning_about(inner, adapter.compressor, own, _WHEN)
            if message is not None and not adapter.momentum_warned:
                adapter.momentum_warned = True
                warn(message)
        return True


def _optimizers():
    """Return the optimizers of Keras 2 and 3 that exist in this process."""
    kinds = []
    for name in ("keras", "tf_keras"):
        module = getattr(sys.modules.get(name), "optimizers", None)
        for place in (module, getattr(module, "legacy", None)):
            kind = getattr(place, "Optimizer", None)
            if isinstance(kind, type):
                kinds.append(kind)
    is_one: dict[type, bool] = {}  # asking each object would take a second
    found = []
    for one in gc.get_objects():
        kind = type(one)  # proxies have another __class__, and may fail
        if kind not in is_one:
            is_one[kind] = issubclass(kind, tuple(kinds))
        if is_one[kind]:
            found.append(one)
    return found


def _updates(optimizer, variable):
    """Return whether an optimizer has already updated a variable."""
    of_keras_3 = getattr(optimizer, "_trainable_variables", None)
    if of_keras_3 is not None:
        return any(one is variable or one.value is variable for one in of_keras_3)
    known = getattr(optimizer, "_index_dict", None) or getattr(optimizer, "_slots", {})
    return getattr(variable, "_unique_id", None) in known
