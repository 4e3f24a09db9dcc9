"""Prepare a Keras optimizer for error feedback: see :func:`deepreduce_hvd.prepare`."""

import numbers
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from deepreduce_hvd.base_preparation import (
    Preparation,
    expect_one_compressor,
    momentum_in_use,
    undo,
)
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.graph import is_exported
from deepreduce_hvd.tensorflow.local_variables import local_variable
from deepreduce_hvd.user_warnings import warn

#: optimizer -> the attribute that has its momentum, or None if its update has no momentum
KNOWN = {
    "SGD": "momentum",
    "RMSprop": "momentum",
    "Adam": "beta_1",
    "AdamW": "beta_1",
    "Adamax": "beta_1",
    "Nadam": "beta_1",
    "Adagrad": None,
    "Adadelta": None,
}

#: settings of Keras optimizers that clip gradients
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")

#: slot -> variable: whether gradients pass the compressor, of slots whose update was traced before
_passes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


# For type checkers, the mixin derives from the class that it is combined with at run time.
if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:
    _Optimizer = object


class _Prepared(_Optimizer):
    """Mixin: compressed variables are updated without momentum.

    During the update of such a variable, momentum is 0 and the learning rate is larger. This also
    works inside ``hvd.DistributedOptimizer``, which makes a subclass of the optimizer's class.
    """

    preparation: Preparation
    momentum_name: str
    original_class: Any
    #: the compressor's adapter, also after ``close``, which replaces it
    adapter: Any
    # not an attribute of instances: Keras saves what these have
    _factors: ClassVar[dict[int, float]] = {}
    #: adapters of the compressors that a warning was about
    _unused: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    @property
    def learning_rate(self):
        # Keras 2 reads it in update_step; Keras 3 passes it
        rate = super().learning_rate
        factor = self._factors.get(id(self))
        return rate if factor is None else rate * factor

    @learning_rate.setter
    def learning_rate(self, rate):
        self.original_class.learning_rate.fset(self, rate)

    def update_step(self, gradient, variable, *learning_rate):
        slot = self.adapter.variables.slot_of(variable)
        if slot is not None:
            self._expect_exchange(slot)
            # Horovod keeps its graphs, so a second optimizer is not seen when it reduces
            self.adapter.void_steps.expect_scale(slot)
        if not self.preparation.compresses(variable) or self._is_complete(gradient, slot):
            return super().update_step(gradient, variable, *learning_rate)
        if tf.executing_eagerly() or slot.reduced or self.adapter.sends_nothing(slot):
            return self._update(slot, gradient, variable, *learning_rate)
        # A graph that is traced with zeros, to create the state, may get reduced gradients later.
        return tf.cond(
            _passes_of(slot).read_value(),
            lambda: self._update(slot, gradient, variable, *learning_rate),
            lambda: super(_Prepared, self).update_step(gradient, variable, *learning_rate),
        )

    def _update(self, slot, gradient, variable, *learning_rate):
        """Update a compressed variable: an embedding table with momentum, others without."""
        momentum = self._momentum()

        def update():
            return super(_Prepared, self).update_step(gradient, variable, *learning_rate)

        def update_without_momentum():
            return self._update_without_momentum(momentum, slot, gradient, variable, *learning_rate)

        if not tf.is_tensor(momentum) and not momentum:
            return update()
        # nothing of an embedding table is delayed
        keeps = slot.table is not None and slot.table.keeps_momentum()
        if isinstance(keeps, bool):
            return update() if keeps else update_without_momentum()
        return tf.cond(keeps, update, update_without_momentum)

    def _update_without_momentum(self, momentum, slot, gradient, variable, *learning_rate):
        """Update a variable with a momentum of 0 instead of ``momentum``."""
        setting, factor = getattr(self, self.momentum_name), 1.0
        if self.momentum_name == "momentum":
            own = momentum_in_use(self.adapter, slot, self.preparation.policy_of(variable).memory)
            factor = self._factor(own, momentum)
        if not learning_rate:
            self._factors[id(self)] = factor
        setattr(self, self.momentum_name, 0.0)
        try:
            return super().update_step(
                gradient, variable, *(rate * factor for rate in learning_rate)
            )
        finally:
            setattr(self, self.momentum_name, setting)
            self._factors.pop(id(self), None)

    def _momentum(self):
        """Return the momentum: a number, or a tensor if a graph reads it in each step."""
        setting = _called(getattr(self, self.momentum_name))
        if tf.executing_eagerly() or isinstance(setting, numbers.Real):
            return momentum_of(self)
        return tf.cast(tf.convert_to_tensor(setting), tf.float32)

    def _factor(self, own, momentum):
        """Return the factor of the learning rate for a number or a tensor."""
        if not tf.is_tensor(momentum):
            return self.preparation.learning_rate_factor(own, momentum)
        below_one = tf.debugging.assert_less(
            momentum, 1.0, message="prepare: expected a momentum below 1"
        )
        with tf.control_dependencies([below_one]):
            # without momentum, nothing is replaced
            return tf.where(momentum == 0, 1.0, self.preparation.unchecked_factor(own, momentum))

    def _is_complete(self, gradient, slot):
        """Return whether nothing of a gradient is delayed, as it did not pass the compressor.

        The variable is local to this rank, or Horovod itself gathered slices. One process alone,
        where no gradient passes, makes the same steps as several.
        """
        if slot.reduced:
            return False
        if isinstance(gradient, tf.IndexedSlices):
            return True
        if self.adapter.sends_nothing(slot):
            return False
        if self._is_local():
            return True
        self._warn_of_missing_compression(gradient)
        return tf.executing_eagerly()

    def _is_local(self):
        """Return whether a gradient that did not pass the compressor belongs to this rank alone.

        It does if others did pass, or if none can.
        """
        adapter = self.adapter
        return (
            not adapter.transport.includes_this_rank
            or not adapter.slots  # after ``close``
            or any(slot.reduced for slot in adapter.slots.values())
        )

    def _warn_of_missing_compression(self, gradient):
        """Warn once that no gradient at all has passed the compressor.

        A step of zeros, which only creates the state of the optimizer, says nothing.
        """
        if (
            self.adapter in self._unused
            or is_exported()
            or (tf.executing_eagerly() and not tf.math.count_nonzero(gradient))
        ):
            return
        self._unused.add(self.adapter)
        traced = (
            ""
            if tf.executing_eagerly()
            else ". A tf.function may be traced with zeros, which create the optimizer's state:"
            " then this does not matter"
        )
        warn(
            f"{kind_of(self)} updates variables whose gradients did not reach the"
            " compressor that it is prepared for: give hvd.DistributedOptimizer or"
            f" hvd.DistributedGradientTape compression=compressor{traced}"
        )

    def _expect_together(self, gradients, variables):
        """Raise InvalidArgumentError if a skipped step would restore only some residuals.

        It is called before the updates, because XLA may compile ``update_step``.
        """
        slot_of = self.adapter.variables.slot_of
        updated = [one for gradient, one in zip(gradients, variables) if gradient is not None]
        slots = [slot for slot in map(slot_of, updated) if slot is not None]
        self.adapter.void_steps.expect_together(slots)

    def _expect_exchange(self, slot):
        """Raise InvalidArgumentError if Horovod's optimizer has never reduced gradients.

        Its class sets an attribute to False, and to True when it first reduces. Gradients that a
        tape of Horovod or the compressor itself reduced are correct without it.
        """
        if (
            getattr(self, "_aggregated_gradients", True)
            or slot.reduced
            or self.adapter.transport.size == 1
        ):
            return
        raise InvalidArgumentError(
            f"prepare: expected the gradient of {slot.label} after a reduction over the ranks, got"
            " one of this rank only, because apply_gradients of hvd.DistributedOptimizer does not"
            " reduce; in a train_step of tf-keras write self.optimizer.minimize(loss, variables,"
            " tape=tape); under Keras 3, where this optimizer never reduces, set"
            " TF_USE_LEGACY_KERAS=1, or use hvd.DistributedGradientTape and the optimizer itself"
        )


class _PreparedOfKeras2(_Prepared):
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        self._expect_together([gradient for gradient, _ in pairs], [one for _, one in pairs])
        return super().apply_gradients(pairs, *args, **kwargs)


class _PreparedOfKeras3(_Prepared):
    def apply(self, grads, trainable_variables=None):
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        self._expect_together(grads, trainable_variables or self._trainable_variables)
        return super().apply(grads, trainable_variables)


def _passes_of(slot):
    """Return a variable: whether gradients of a slot pass the compressor."""
    if slot not in _passes:
        with tf.init_scope(), tf.device("CPU:0"):
            _passes[slot] = local_variable(False, name="deepreduce_passes")
    return _passes[slot]


def note_reduction(slot):
    """Note that gradients of a slot pass the compressor from now on."""
    if slot in _passes:
        with tf.init_scope():
            _passes[slot].assign(True)


def is_prepared(optimizer):
    """Return whether compressed variables of this optimizer are updated without momentum."""
    return isinstance(optimizer, _Prepared)


def momentum_of(optimizer):
    """Return the momentum of a Keras optimizer as a number.

    Return 0 if the optimizer has none or is not known, or if the value is not known while a graph
    is built, as that of a variable in a tf.compat.v1 graph.
    """
    name = KNOWN.get(kind_of(optimizer))
    if name is None:
        return 0.0
    # legacy optimizers have a variable, whose value can be read outside of the traced function only
    with tf.init_scope():
        setting = _called(getattr(optimizer, name, 0.0))
        if isinstance(setting, numbers.Real):
            return setting
        value = tf.get_static_value(tf.convert_to_tensor(setting))
    return 0.0 if value is None else float(value)


def _called(setting):
    return setting() if callable(setting) else setting


def kind_of(optimizer):
    """Return the name of the known Keras class that an optimizer is of, or None."""
    return next(
        (
            kind.__name__
            for kind in type(optimizer).__mro__
            if kind.__name__ in KNOWN and not issubclass(kind, _Prepared)
        ),
        None,
    )


def _hint_on_clipping(optimizer, compressor):
    """Return what to know if an optimizer clips gradients that are delayed; empty otherwise."""
    limits = {name: getattr(optimizer, name, None) for name in _CLIPPING}
    found = [f"{name}={limit:g}" for name, limit in limits.items() if limit is not None]
    if not found or not any(policy.delays for policy in compressor.policies.values()):
        return ""
    return (
        f" {', '.join(found)} clips averages that contain delayed gradients, and what it cuts off"
        " is lost."
    )


def _left_out(optimizer, compressor):
    """Return the names of variables of a prepared optimizer that another compressor lacks."""
    first = optimizer.preparation.compressor
    if first.adapter is not optimizer.adapter:  # it was closed
        return []
    known = compressor.adapter.variables
    return [
        name
        for name, variable in optimizer.adapter.variables.by_name().items()
        if optimizer.adapter.slots[name].state and known.slot_of(variable) is None
    ]


def prepare(optimizer, compressor):
    """Implement :func:`deepreduce_hvd.prepare` for a Keras optimizer."""
    if compressor is not None and is_prepared(optimizer):
        expect_one_compressor(_left_out(optimizer, compressor))
    undo(optimizer, is_prepared(optimizer), wrapped=hasattr(optimizer, "_allreduce_grads"))
    if compressor is None:
        return None
    kind = kind_of(optimizer)
    if kind is None or not hasattr(optimizer, "update_step"):
        raise InvalidArgumentError(
            f"prepare: expected one of {', '.join(KNOWN)} of tf.keras.optimizers, got"
            f" {type(optimizer).__module__}.{type(optimizer).__name__}; prepare the optimizer"
            " inside of a LossScaleOptimizer, and tf.keras.optimizers.Adam in place of"
            " tf.keras.optimizers.legacy.Adam"
        )
    if kind == "Nadam":
        raise InvalidArgumentError(
            "prepare: expected another optimizer than Nadam, whose bias correction depends on"
            " momentum and is shared by all variables; use Adam or AdamW"
        )
    original, name = type(optimizer), KNOWN[kind]
    known = compressor.adapter.variables

    def policy_of(variable):
        slot = known.slot_of(variable)
        return None if slot is None else compressor.policies[slot.label]

    preparation = Preparation(compressor, policy_of, normalizes=kind == "RMSprop")
    momentum, scales = momentum_of(optimizer), name == "momentum"
    changes = preparation.describe(
        original.__name__,
        name,
        [
            # weight decay of Keras is not added to gradients
            (
                momentum,
                preparation.factors(
                    momentum_in_use(
                        compressor.adapter, compressor.adapter.slots[label], policy.memory
                    ),
                    momentum,
                    scales_learning_rate=scales,
                )
                if policy.delays
                else None,
            )
            for label, policy in compressor.policies.items()
        ],
        with_hint=not scales,
    )
    changes += _hint_on_clipping(optimizer, compressor)
    if name is not None:
        mixin = _PreparedOfKeras3 if hasattr(original, "apply") else _PreparedOfKeras2
        optimizer.__class__ = type(
            original.__name__,
            (mixin, original),
            {
                "preparation": preparation,
                "momentum_name": name,
                "original_class": original,
                "adapter": compressor.adapter,
                "__module__": original.__module__,
            },
        )
    return changes
