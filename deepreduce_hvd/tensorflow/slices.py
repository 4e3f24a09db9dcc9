"""Reduce gradients that are given with their variables.

Gradients of embeddings may be slices: their rows are compressed without a dense copy.
"""

import horovod.tensorflow as hvd
import tensorflow as tf

from deepreduce_hvd.communicators import Allgather
from deepreduce_hvd.communicators.wire import AVERAGE, SUM
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.tensorflow.graph import is_exported, position_of, refuse_xla, without_derivative
from deepreduce_hvd.tensorflow.ops import checked, operators
from deepreduce_hvd.tensorflow.slot import reduced_dtype


def reduce_gradient(adapter, gradient, variable, op):
    """Return the reduced gradient of a variable.

    Args:
        adapter: the :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
        gradient: the gradient, a tensor, tf.IndexedSlices or None.
        variable: its variable.
        op: hvd.Average, hvd.Sum, or None for hvd.Average.
    """
    if gradient is None or is_exported():
        return gradient
    refuse_xla()
    op = hvd.Average if op is None else op
    slot = adapter.slot_of(variable, "allreduce_gradients")
    if isinstance(gradient, tf.IndexedSlices):
        return _reduce_slices(adapter, gradient, slot, variable, op)
    return _reduce_tensor(adapter, gradient, slot, variable, op)


def _reduce_tensor(adapter, tensor, slot, variable, op):
    if adapter.sends_nothing(slot):
        return tensor
    return hvd.allreduce(
        tensor, op=op, compression=adapter.bound_to([variable]), process_set=adapter.process_set
    )


def _added_up(slices, slot):
    """Return slices with distinct ascending rows, as other ranks would get them."""
    indices = tf.cast(slices.indices, tf.int64)
    rows = tf.sort(tf.unique(indices).y)
    values = tf.math.unsorted_segment_sum(
        slices.values, tf.searchsorted(rows, indices), tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, tf.constant(slot.shape, tf.int64))


def _as_tensor(slices, slot):
    """Return slices as a tensor of the variable's shape; an error for rows out of range."""
    rows, indices = slot.shape[0], tf.convert_to_tensor(slices.indices)
    within = tf.reduce_all((indices >= 0) & (indices < rows))
    text = f"deepreduce_hvd: parameter {slot.label}: expected rows from 0 to {rows - 1}, got"
    with tf.control_dependencies([tf.debugging.Assert(within, [text, indices])]):
        return tf.math.unsorted_segment_sum(slices.values, indices, rows)


def _expect_shape(slices, slot):
    """Raise InvalidArgumentError for slices of a variable that has another shape, if known."""
    values, shape = tf.TensorShape(slices.values.shape), slices.dense_shape
    whole = None if shape is None else tf.get_static_value(shape)
    if not values[1:].is_compatible_with(slot.shape[1:]):
        got = f"slices with values of shape {values}"
    elif whole is not None and tuple(whole) != slot.shape:
        got = f"slices of a tensor of shape {tf.TensorShape(whole)}"
    else:
        return
    raise InvalidArgumentError(
        f"allreduce_gradients: expected the gradient of {slot.label}, of shape {slot.shape}, got"
        f" {got}; give each gradient with its own variable"
    )


def _reduce_slices(adapter, slices, slot, variable, op):
    _expect_shape(slices, slot)
    if slot.choice is not None:
        raise InvalidArgumentError(
            f"parameter {slot.label}: expected a dense gradient with schedule='auto', whose plans"
            " are for dense gradients, got slices; use sparse_as_dense=True or another schedule"
        )
    if slot.dense:
        return _reduce_tensor(adapter, _as_tensor(slices, slot), slot, variable, op)
    if not isinstance(adapter.compressor.communicator, Allgather):
        raise InvalidArgumentError(
            f"parameter {slot.label}: expected Allgather for slices, got"
            f" {adapter.compressor.communicator!r}; with sparse_as_dense=True all communicators"
            " work"
        )
    codec, memory = slot.policy.codec, slot.policy.memory
    if not codec.is_native(memory) or type(memory) not in (NoMemory, Residual):
        raise InvalidArgumentError(
            f"parameter {slot.label}: expected a built-in codec and NoMemory or Residual for"
            f" slices, got {codec!r} and {memory!r}; with sparse_as_dense=True all codecs and"
            " memories work"
        )
    if adapter.sends_nothing(slot):
        return _added_up(slices, slot)
    agreed = adapter.require_agreement()
    if slot.home is not None:
        slot.move_to_host()
    slot.dtype = slices.dtype
    adapter.note_reduction(slot, AVERAGE if op == hvd.Average else SUM)
    collectives = adapter.collectives
    with tf.device("CPU:0"), tf.control_dependencies(agreed):
        step = slot.steps_taken.read_value()  # before the encoder increments it
        last_scale = slot.scale_to_compare()
        position = position_of(adapter.compressor, slot, 0)  # the records have the step
        begun = adapter.void_steps.begin(slot, slices.values, last_scale)
        begun += adapter.optimizers.look_for(slot)
        if slot.table is None:
            numbers = adapter.numbers[slot.policy].at(step)
        else:
            numbers = slot.table.send_slices()
        with tf.control_dependencies([step, *begun]):
            payload = checked(
                operators.deepreduce_encode_slices, slices.values,
                tf.cast(slices.indices, tf.int64), numbers, position,
                [part.handle for part in slot.state], slot.records, rows=slot.shape[0],
            )  # fmt: skip
        name = collectives.name_for(slot)
        probe = collectives.probe(step, last_scale, reduced_dtype(slices.dtype))
        reduced = collectives.allreduce(probe, op, f"{name}.probe")
        scale = collectives.scale_of(slot, reduced, step, last_scale)
        compared = adapter.starting_values.compare_again(slot, step, scale)
        with tf.control_dependencies([scale, *compared]):  # then all ranks take part
            gathered = collectives.gather_messages(payload, name)
        values, indices = checked(
            operators.deepreduce_decode_slices, gathered, scale, collectives.size,
            slot.seconds.variable.handle,
            T=slices.dtype, shape=slot.shape, variable=slot.label,
        )  # fmt: skip
        dense_shape = tf.constant(slot.shape, tf.int64)
    return adapter.void_steps.look_at(
        slot,
        tf.IndexedSlices(
            without_derivative(values, slices.values), indices, dense_shape=dense_shape
        ),
    )
