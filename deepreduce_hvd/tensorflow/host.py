"""Compression of gradients on the host, and their sums: by operators, or by NumPy in the graph."""

import numpy as np
import tensorflow as tf

from deepreduce_hvd import numpy_backend as neutral
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.tensorflow.graph import position_of, rank_of_job, without_derivative
from deepreduce_hvd.tensorflow.ops import DTYPES, checked, operators
from deepreduce_hvd.tensorflow.slot import reduced_dtype


class HostPath:
    """The path of one compressor for gradients that are compressed on the host.

    Built-in stages run as operators. A custom stage runs in ``tf.numpy_function``.
    """

    def __init__(self, compressor):
        self._compressor = compressor

    def encode(self, slot, gradient, numbers, step):
        """Return the message of a gradient, (n,) uint8, and update the slot.

        Args:
            slot: slot of the variable.
            gradient: its gradient.
            numbers: the codec's :class:`CodecNumbers`; None for custom stages.
            step: value of the slot's step counter before this step.
        """
        if numbers is None:
            return self._encode_in_numpy(slot, gradient)
        # the operator takes the step from the slot's records
        position = position_of(self._compressor, slot, 0)

        def encode(gradient, numbers, memory):
            handles = [part.handle for part in memory]
            return checked(
                operators.deepreduce_encode, gradient, numbers, position, handles, slot.records
            )

        if slot.table is not None:
            return slot.table.encode(gradient, slot.state[0], encode, numbers.at(step))
        return encode(gradient, numbers.at(step), slot.state)

    def _encode_in_numpy(self, slot, gradient):
        compressor, dtype = self._compressor, DTYPES[gradient.dtype]

        def encode(gradient, steps, rank, *state):
            compressor.adapter.expect_open()
            state = tuple(part.copy() for part in state)
            try:
                payload, _ = neutral.encode_numpy(
                    slot.policy.codec, slot.policy.memory, gradient, state, 0.0, compressor.seed,
                    int(steps), slot.key, int(rank),
                    dtype=dtype,
                )  # fmt: skip
            # catch all errors: the other ranks must get a notice instead of waiting
            except Exception as error:
                payload = wire.notice(error)
            return [payload, *state]

        flat = tf.reshape(tf.cast(gradient, reduced_dtype(gradient.dtype)), [-1])
        kinds = [tf.uint8, *[tf.float32] * len(slot.state)]
        encoded = tf.numpy_function(
            encode, [flat, slot.steps_taken, rank_of_job(), *slot.state], kinds
        )
        payload, *state = tf.nest.flatten(encoded)  # eagerly, a single result is not a list
        payload = tf.ensure_shape(payload, [None])
        updates = [variable.assign(new) for variable, new in zip(slot.state, state)]
        with tf.control_dependencies([payload]):  # a step that fails before this does not count
            updates += [slot.steps_taken.assign_add(1), slot.payload.variable.assign(payload)]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return tf.identity(payload)

    def decode(self, slot, group, gradient, member, shape, scale, ranks):
        """Return the sum of one gradient over ``ranks`` ranks."""
        # a plan may send the next gradient otherwise, but not with another codec
        if self._compressor.policies[slot.label].codec.is_native(NoMemory()):
            return checked(
                operators.deepreduce_decode_sum, group.gathered, scale, tf.cast(shape, tf.int64),
                ranks, [], [gradient], [slot.seconds.variable.handle], [],
                member=member, members=len(group.payloads), variable=slot.label, T=gradient.dtype,
            )  # fmt: skip
        return self._decode_in_numpy(slot, group, gradient, member, shape, scale, ranks)

    @staticmethod
    def _decode_in_numpy(slot, group, gradient, member, shape, scale, ranks):
        members = len(group.payloads)

        def decode(gathered, factor, ranks):
            messages = wire.split(gathered, of_each=members)
            for number in range(members):  # no gradient of the message may change its variable
                wire.raise_notices(slot.label, messages, number, members)
            if len(messages) != ranks * members:
                raise CorruptPayloadError(
                    f"parameter {slot.label}: expected {members} messages of each of {ranks} ranks,"
                    f" got {len(messages)} in all"
                )
            payloads = np.split(gathered, messages.bounds[1:-1])[member::members]
            return neutral.decode_sum_numpy(
                payloads, np.zeros(slot.elements, np.float32), float(factor)
            )

        total = tf.numpy_function(decode, [group.gathered, scale, ranks], tf.float32)
        return tf.cast(tf.reshape(without_derivative(total, gradient), shape), gradient.dtype)
