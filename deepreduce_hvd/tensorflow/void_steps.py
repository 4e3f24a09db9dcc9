"""Void steps on TensorFlow: undo their changes of the memories.

With loss scaling, an optimizer skips a step if any of its gradients has NaN or Inf. Horovod traces
each gradient into a separate branch of the graph, and a tensor of one branch cannot be used in
another. A variable shared by all branches would make their exchanges wait for each other. So the
graph calls Python when a gradient's step begins and when a result is not finite, and a memory is
restored at the beginning of its next step.

Python also reads the loss scale. Horovod keeps its graphs when a model is compiled again, so a
graph that had the variable of an optimizer would read it after that optimizer was replaced.
"""

import itertools
import sys
import threading
import weakref

import numpy as np
import tensorflow as tf

from deepreduce_hvd.coordination.frames import frames_of
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.graph import is_exported, is_in_xla
from deepreduce_hvd.tensorflow.local_variables import write
from deepreduce_hvd.tensorflow.variables import reducing_frame
from deepreduce_hvd.validation import expect_loss_scale

#: methods of Keras' LossScaleOptimizer that call those of the optimizer inside
_CALLING = ("compute_gradients", "_compute_gradients", "get_gradients", "apply_gradients")


class OptimizerStep:
    """One step of one optimizer.

    Attributes:
        number: number above 0 that no other step has.
        slots: slots whose gradients have come.
        void: whether some result has NaN or Inf.

    Args:
        scale: the loss scale of its gradients.
    """

    _numbers = itertools.count(1)

    def __init__(self, scale):
        self.number = next(self._numbers)
        self.scale = scale
        self.slots = set()
        self.void = False


class Reduction:
    """The gradients that are reduced together, as traced.

    Attributes:
        step: the OptimizerStep that runs or has run last, or None.
        scaled_by: function that returns the Keras LossScaleOptimizer with a dynamic scale that
            reduces them; None if there is none, or none any more.
    """

    def __init__(self):
        self.step = None
        self.scaled_by = lambda: None


class _Tracing:
    """The reduction that is being traced, and how many of its gradients are still to come."""

    def __init__(self, frame):
        gradients = [gradient for gradient in frame.f_locals["grads"] if gradient is not None]
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise InvalidArgumentError(
                "compress: expected dense gradients with loss_scale=, got tf.IndexedSlices, which"
                " Horovod reduces without the compressor; use sparse_as_dense=True or"
                " deepreduce_hvd.tensorflow.allreduce_gradients"
            )
        self.frame = frame
        self.reduction = Reduction()
        self.left = len(gradients)


class VoidSteps:
    """The void steps of a compressor with ``loss_scale=``; without it, does nothing."""

    def __init__(self, loss_scale):
        self._loss_scale = loss_scale
        self._lock = threading.Lock()  # a graph's gradients come in several threads
        self._tracing = None
        self._together = None
        self._scaled: weakref.WeakSet = weakref.WeakSet()  # the LossScaleOptimizers so far
        self._last_scaled = lambda: None  # returns that of the last step
        self._takes_turns = False  # whether one of them came again after another one

    @property
    def active(self):
        return self._loss_scale is not None

    # --- gradients of one step ---

    def reduce_together(self):
        """Return a context in which all gradients belong to one step.

        It replaces Horovod's tapes and optimizers, which group gradients otherwise.
        """
        return _Together(self)

    def reduction(self):
        """Return the Reduction of the gradient that is being compressed.

        A gradient outside of tapes, optimizers and :meth:`reduce_together` is a step by itself.
        """
        frame, _ = reducing_frame()
        if frame is None:
            return self._together or Reduction()
        if self._tracing is None or self._tracing.frame is not frame:
            self._tracing = _Tracing(frame)
        tracing = self._tracing
        tracing.left -= 1
        if tracing.left <= 0:
            self._tracing = None  # the frame would keep gradients and variables alive
        return tracing.reduction

    def expect_scale(self, slot):
        """Raise InvalidArgumentError if a dynamic loss scale is in use that the memory ignores.

        Here the LossScaleOptimizer of Keras 2 is detected, if it is among the callers. All others
        are found by :mod:`~deepreduce_hvd.tensorflow.optimizers_in_use`.
        """
        optimizer = _scaling_optimizer() if slot.state and not self.active else None
        if getattr(optimizer, "dynamic", False):
            raise missing_scale(optimizer, slot)

    def expect_together(self, slots):
        """Raise InvalidArgumentError if an optimizer's step has gradients of several reductions.

        An optimizer skips all variables of a step if one result is not finite. So all of them must
        belong to one :class:`OptimizerStep`, or only some of their memories would be restored. This
        is found when the step runs: Horovod and the program trace their functions at other times.
        XLA cannot compile such a check.

        Args:
            slots: list of the slots of the variables that the optimizer updates.
        """
        if not self.active or len(slots) < 2 or is_exported() or is_in_xla():
            return
        with tf.device("CPU:0"):
            numbers = tf.stack([slot.reduced_in.variable.read_value() for slot in slots])
            if tf.executing_eagerly():
                _expect_equal(slots, numbers.numpy())
            else:
                tf.numpy_function(lambda found: _expect_equal(slots, found), [numbers], tf.bool)

    # --- operators ---

    def begin(self, slot, gradient, last_scale):
        """Restore the memory if the last step was void, and rescale it to the current loss scale.

        Args:
            slot: the slot of the memory.
            gradient: its gradient, a tensor. The scale is read when it is ready: the loss was
                scaled before, and optimizers change the scale after they have all results.
            last_scale: the slot's ``scale_to_compare()``, a tensor.

        Returns:
            List of tensors that must be computed before the memory is used.
        """
        self.expect_scale(slot)
        if not self.active:
            return []
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise InvalidArgumentError(
                "compress: expected eager execution or a tf.function with loss_scale=, got a graph"
                " of tf.compat.v1"
            )
        reduction = self.reduction()
        optimizer = _scaling_optimizer()
        if getattr(optimizer, "dynamic", False):
            reduction.scaled_by = weakref.ref(optimizer)

        def begun(scale):
            return self._begin(slot, reduction, float(scale))

        kinds = [tf.bool, tf.float32, tf.float64, tf.float64, tf.int64]
        with tf.device("CPU:0"):
            with tf.control_dependencies([gradient, last_scale]):
                found = tf.numpy_function(begun, [slot.scale.read_value()], kinds)
            undo, factor, scale, compared, number = (tf.ensure_shape(one, []) for one in found)
            with tf.control_dependencies([undo, factor]):
                updates = [
                    slot.scale.assign(scale),
                    slot.compared_scale.variable.assign(compared),
                    slot.reduced_in.variable.assign(number),
                ]
        for part, copy in zip(slot.state, slot.copies):
            with tf.device(slot.home or "CPU:0"), tf.control_dependencies([undo, factor]):
                kept = _settled(part, copy, undo, factor)
                updates.append(part.assign(kept))
                # shares the buffer until the encoder changes one of them
                updates.append(copy.assign(kept))
        if slot.choice is not None:
            remembers = tf.logical_or(slot.choice.remembers.read_value(), undo)
            updates.append(slot.choice.remembers.assign(remembers))
        if slot.table is not None:
            updates.append(slot.table.after_undo(undo))
        return [update for update in [undo, *updates] if tf.is_tensor(update)]

    def look_at(self, slot, result):
        """Return ``result``, an optimizer's gradient, after recording whether it is finite."""
        if not self.active:
            return result

        def void():
            slot.step.void = True
            return False

        numbers = result.values if isinstance(result, tf.IndexedSlices) else result
        finite = tf.reduce_all(tf.math.is_finite(numbers))
        with tf.device("CPU:0"):
            noted = tf.cond(
                finite, lambda: tf.constant(True), lambda: tf.numpy_function(void, [], tf.bool)
            )
        with tf.control_dependencies([noted]):
            numbers = tf.identity(numbers)
        if isinstance(result, tf.IndexedSlices):
            return tf.IndexedSlices(numbers, result.indices, result.dense_shape)
        return numbers

    # --- called by the graph ---

    def _begin(self, slot, reduction, last_scale):
        """Begin a step of a slot.

        Returns:
            Whether the slot's last step was void, the factor for its memory, the loss scale, the
            one that ranks compare in the next step, and the number of the OptimizerStep. Ranks do
            not compare the scale of the first step, because programs may broadcast the variables of
            an optimizer after it.
        """
        with self._lock:
            if reduction.step is None or slot in reduction.step.slots:
                reduction.step = OptimizerStep(self._current_scale())
                self._expect_scale_of(reduction)
            undo = slot.step is not None and slot.step.void
            slot.step = reduction.step
            slot.step.slots.add(slot)
            compared = slot.step.scale if slot.has_begun else 0
            slot.has_begun = True
        scale = slot.step.scale
        factor = np.float32(scale / last_scale if last_scale > 0 else 1)
        return undo, factor, np.float64(scale), np.float64(compared), np.int64(slot.step.number)

    def _expect_scale_of(self, reduction):
        """Raise InvalidArgumentError if optimizers with different scales take turns.

        A second optimizer alone is one of a model that was compiled again.
        """
        optimizer, scale = reduction.scaled_by(), reduction.step.scale
        if optimizer is None:
            return
        if optimizer is not self._last_scaled():
            self._takes_turns = self._takes_turns or optimizer in self._scaled
            self._scaled.add(optimizer)
            self._last_scaled = weakref.ref(optimizer)
        if self._takes_turns and float(np.asarray(optimizer.loss_scale)) != scale:
            raise InvalidArgumentError(
                f"Compressor loss_scale: expected the scale {float(optimizer.loss_scale):g} of the"
                f" LossScaleOptimizer that reduces these gradients, got {scale:g}, of another"
                " optimizer; give each optimizer with a loss scale a compressor of its own"
            )

    def _current_scale(self):
        try:
            scale = self._loss_scale()
        except AttributeError as error:
            raise InvalidArgumentError(
                "Compressor loss_scale: expected a function that returns the current scale, got"
                f" AttributeError: {error}; write lambda: model.optimizer.loss_scale in Keras 2, or"
                " lambda: optimizer.dynamic_scale in Keras 3, after"
                " optimizer.build(model.trainable_variables)"
            ) from error
        return expect_loss_scale(float(np.asarray(scale)))

    def settle(self, slots):
        """Restore the memories of void steps, before anything else reads or changes them."""
        for slot in slots:
            if slot.step is not None and slot.step.void:
                slot.restore()
            slot.step = None

    def forget(self, slots):
        """Forget the last steps; keep the memories as they are."""
        for slot in slots:
            slot.step = None
            if slot.has_begun:
                slot.has_begun = False
                write(slot.compared_scale.variable, np.float64(0))
                write(slot.reduced_in.variable, np.int64(0))
        self._tracing = self._together = None


def missing_scale(optimizer, slot):
    """Return the error about a LossScaleOptimizer whose scale the compressor does not know."""
    name = "dynamic_scale" if hasattr(optimizer, "dynamic_scale") else "loss_scale"
    return InvalidArgumentError(
        f"Compressor loss_scale: expected the scale of Keras' {type(optimizer).__name__},"
        f" got None; the optimizer scales the gradient of {slot.label}, and without its"
        " scale the residual would be in units of earlier scales; give Compressor"
        f" loss_scale=lambda: model.optimizer.{name}"
    )


def _scaling_optimizer():
    """Return the Keras LossScaleOptimizer that computes or applies the gradients, or None."""
    for frame in frames_of(sys._getframe(1)):
        caller = (
            frame.f_locals.get("self")
            if frame.f_code.co_name.removeprefix("tf__") in _CALLING
            else None
        )
        if type(caller).__name__.startswith("LossScaleOptimizer"):
            return caller
    return None


def _expect_equal(slots, numbers):
    """Raise InvalidArgumentError if the last gradients of slots are of several steps.

    Args:
        slots: the slots.
        numbers: the numbers of their steps; 0 if there was none.

    Returns:
        True.
    """
    found = [(slot, number) for slot, number in zip(slots, numbers) if number]
    other = next((slot for slot, number in found if number != found[0][1]), None)
    if other is not None and any(slot.state for slot, _ in found):
        raise InvalidArgumentError(
            "apply_gradients: expected gradients of one reduction with loss_scale=, got those of"
            f" {found[0][0].label} and {other.label} of two calls, as of gradient() of"
            " hvd.DistributedGradientTape, and a skipped step would restore the residuals of one"
            " call only; compute both with plain tapes, and reduce them together with"
            " deepreduce_hvd.tensorflow.allreduce_gradients(gradients, variables, compression)"
        )
    return True


class _Together:
    def __init__(self, steps):
        self._steps = steps

    def __enter__(self):
        self._steps._together = Reduction()

    def __exit__(self, *failure):
        self._steps._together = None


def _settled(part, copy, undo, factor):
    """Return the memory's array, or its copy if ``undo``, times a factor.

    With nothing to do, the result shares the array's buffer.
    """

    def changed():
        return tf.cond(undo, copy.read_value, part.read_value) * factor

    return tf.cond(tf.logical_or(undo, tf.not_equal(factor, 1)), changed, part.read_value)
