"""Compression of gradients on the GPU of their variable, and the messages from and to that GPU.

Scalars of the graph (steps, lengths, seconds) stay on the host: an operator on a GPU cannot use
variables on the host and does not read numbers there.
"""

import horovod.tensorflow as hvd
import tensorflow as tf

from deepreduce_hvd.adapters.gpu import BaseDevicePath
from deepreduce_hvd.tensorflow import ops as adapter
from deepreduce_hvd.tensorflow.graph import after, position_of, time_after
from deepreduce_hvd.tensorflow.ops import checked, operators
from deepreduce_hvd.user_warnings import warn

HOST = "CPU:0"


def gpu_of(parameter):
    """Return the name of the GPU that has a variable, or None."""
    # a Keras 3 variable wraps a TensorFlow variable
    variable = (
        parameter if isinstance(parameter, tf.Variable) else getattr(parameter, "value", parameter)
    )
    name = getattr(variable, "device", None)
    if not isinstance(name, str) or tf.DeviceSpec.from_string(name).device_type != "GPU":
        return None
    return name


class DevicePath(BaseDevicePath):
    """The path of one compressor for gradients on GPUs."""

    def __init__(self, compressor):
        without = "this installation's TensorFlow operators are built without CUDA"
        supports = adapter.cuda_supports
        super().__init__(
            compressor, without if supports is None else None, supports, hvd.nccl_built
        )
        self._warned = False

    def home(self, parameter):
        """Return the GPU where a variable's gradients are compressed; None for the host."""
        gpu = gpu_of(parameter)
        if gpu is not None and self.why_not is not None and not self._warned:
            self._warned = True
            warn(f"gradients on {gpu} are compressed on the host: {self.why_not}")
        return gpu if self.why_not is None else None

    def encode(self, slot, gradient, numbers):
        """Return the message of a gradient, on the slot's GPU.

        Args:
            slot: slot of the variable.
            gradient: its gradient.
            numbers: the codec's :class:`CodecNumbers`.
        """
        with tf.device(HOST):
            started = time_after(gradient)
            step = slot.steps_taken.read_value()
            with tf.control_dependencies([step]):
                updates = [slot.steps_taken.assign_add(1)]
            position = position_of(self.compressor, slot, step)
            table = tf.convert_to_tensor(numbers.at(step))
        with tf.device(slot.home), tf.control_dependencies([started]):
            message = checked(
                operators.deepreduce_encode, gradient, table, position,
                [part.handle for part in slot.state], [], notices=True
            )  # fmt: skip
        with tf.device(slot.payload_home):
            updates.append(slot.payload.variable.assign(message))
        with tf.device(HOST):
            updates.append(slot.seconds.variable.assign_add([time_after(message) - started, 0]))
        with tf.device(slot.home), after(updates):
            return tf.identity(message)

    def gather(self, group, name, collectives):
        """Gather the messages of a group.

        Returns:
            The messages of all ranks, on the slots' GPU or on the host, and the length of each, on
            the host.
        """
        homes = {slot.home for slot in group.slots}
        on_device = self.nccl and len(homes) == 1 and None not in homes
        if on_device:
            with tf.device(homes.pop()):
                gathered = collectives.allgather(group.message, name)
                sizes = [tf.size(message, tf.int64) for message in group.payloads]
            with tf.device(HOST):
                return gathered, collectives.allgather(tf.stack(sizes), f"{name}_lengths")
        with tf.device(HOST):
            gathered = collectives.gather_messages(group.message, name)
            return gathered, checked(
                operators.deepreduce_lengths, gathered, variable=group.slots[0].label
            )

    def decode(self, slot, group, gradient, member, shape, scale, ranks, numbers):
        """Return the sum of one gradient over ``ranks`` ranks, on the slot's GPU."""
        with tf.device(HOST):
            started = time_after(group.lengths)
            shape, table = tf.cast(shape, tf.int64), tf.constant(numbers.last)
        with tf.device(slot.home), tf.control_dependencies([started]):
            total = checked(
                operators.deepreduce_decode_sum, group.gathered, scale, shape, ranks, [],
                [gradient], [], [group.lengths, table],
                member=member, members=len(group.payloads), variable=slot.label, T=tf.float32,
            )  # fmt: skip
        with tf.device(HOST):
            update = slot.seconds.variable.assign_add([0, time_after(total) - started])
        with tf.device(slot.home), after([update]):
            return (
                tf.cast(total, gradient.dtype)
                if gradient.dtype != tf.float32
                else tf.identity(total)
            )
