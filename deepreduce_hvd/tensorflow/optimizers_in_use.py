"""Keras optimizers that update a compressor's variables, but do not reduce their gradients.

If a tape reduces, the optimizer is not among the callers of ``compress``. So it is looked for among
all objects of the process. An optimizer counts once its number of steps grows: that of a loaded
model may never step. A program may accumulate gradients before its optimizer first steps. So the
search is repeated a few times, until an optimizer is known for each variable.
"""

import contextlib
import gc
import sys
import weakref
from typing import Any

import tensorflow as tf

from deepreduce_hvd.tensorflow.graph import is_exported
from deepreduce_hvd.tensorflow.local_variables import local_variable, read
from deepreduce_hvd.tensorflow.unprepared import optimizer_that_reduces, warning_about
from deepreduce_hvd.tensorflow.void_steps import missing_scale
from deepreduce_hvd.user_warnings import warn

_WHEN = "before the training step is traced"
#: The reductions before which the optimizers are looked at. All but the last look also note the
#: number of steps of new ones. A graph may count its step before or after the look, so there are at
#: least two reductions between looks.
_LOOKS = (1, 3, 11, 101)


class OptimizersInUse:
    """The search for the optimizers of one compressor.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._slot = None  # the first one with a memory, whose reductions are counted
        self._reductions: Any = None  # their number, a variable
        self._left = len(_LOOKS)
        self._known = {}  # id of an optimizer -> (weak reference to it, its number of steps)
        self._updated = set()  # names of the variables whose optimizer is known

    def look_for(self, slot):
        """Look for the optimizers, in some of the first steps of this process.

        Args:
            slot: slot of the gradient that is compressed.

        Returns:
            List of tensors that must be computed before the memory is used.
        """
        if not slot.state or not tf.compat.v1.executing_eagerly_outside_functions():
            return []
        if is_exported() or optimizer_that_reduces()[0] is not None:  # that one is known
            return []
        if self._slot is None:
            # the step counter of the slot may be loaded from a checkpoint, and so may skip a look
            with tf.init_scope(), tf.device("CPU:0"):
                self._slot, self._reductions = slot, local_variable(tf.constant(0, tf.int64))
        if slot is not self._slot or not self._left:
            return []
        with tf.device("CPU:0"):
            number = self._reductions.assign_add(1, read_value=True)
            if tf.executing_eagerly():
                if int(number) in _LOOKS:
                    self._look()
                return []
            found = tf.cond(
                tf.reduce_any(tf.equal(number, _LOOKS)),
                lambda: tf.numpy_function(self._look, [], tf.bool),
                lambda: tf.constant(True),
            )
        return [tf.ensure_shape(found, [])]

    def _look(self):
        """Warn of momentum, and raise InvalidArgumentError if a loss scale is not known."""
        if not self._left:
            return True
        self._left -= 1
        variables = self._adapter.variables.by_name()
        self._check(variables)
        if variables.keys() <= self._updated:
            self._left = 0
        for optimizer in _optimizers() if self._left else ():
            known, _ = self._known.get(id(optimizer), (lambda: None, 0))
            if known() is not optimizer:  # ids are used again
                self._known[id(optimizer)] = weakref.ref(optimizer), _steps_of(optimizer)
        return True

    def _check(self, variables):
        """Check the known optimizers that have stepped variables since they were found."""
        adapter = self._adapter
        for known, steps in list(self._known.values()):
            optimizer = known()
            if optimizer is None or _steps_of(optimizer) <= steps:
                continue
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            names = [name for name, one in variables.items() if _updates(inner, one)]
            if not names:
                continue
            self._updated.update(names)
            scales = getattr(optimizer, "dynamic", False) or hasattr(optimizer, "dynamic_scale")
            if scales and not adapter.void_steps.active:
                raise missing_scale(optimizer, self._slot)
            own = [variables[name] for name in names]
            message = warning_about(inner, adapter.compressor, own, _WHEN)
            if message is not None and not adapter.momentum_warned:
                adapter.momentum_warned = True
                warn(message)


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


def _steps_of(optimizer):
    """Return how many steps an optimizer has made, with those of the one inside.

    In Keras 3, a LossScaleOptimizer counts the steps that it skips, but not the one inside.
    """
    total = 0
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        # not the property: in an old optimizer of Keras 2, it creates the counter
        counter = getattr(one, "_iterations", None)
        if counter is not None:
            # an optimizer of another graph or another framework steps nothing here
            with contextlib.suppress(Exception):
                total += int(read(counter))
    return total
