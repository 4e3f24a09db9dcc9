"""Whether all ranks train from the same values of the variables.

Programs broadcast the variables before their first step, or after it, because an optimizer creates
variables of its own in it. So values that differ before the first step are compared again in the
second one. They may be broadcast even later, where one call makes several steps. So those that
still differ are compared once more, many steps later. Ranks that differ then have not been made
equal, and would never be.

Values that were equal in the second step do not count later: other processors may round otherwise.
"""

import functools
import zlib

import numpy as np
import tensorflow as tf

from deepreduce_hvd.coordination.compared_settings import Setting
from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.tensorflow.local_variables import read
from deepreduce_hvd.tensorflow.ops import DTYPES
from deepreduce_hvd.user_warnings import warn

#: the last comparison is so many steps after the first one; calls rarely make more steps
_LATER = 100


class StartingValues:
    """The comparison of one compressor.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._again = {}  # slot -> its step counter when its variable is compared again
        self._differing = set()  # slots whose variables differed in the second step
        self._warned = False

    def settings(self):
        """Return a setting with the checksum of each variable, for the handshake."""
        return [
            Setting(
                f"values of {name}",
                str(_checksum(read(variable))),
                functools.partial(self._differ, name),
            )
            for name, variable in self._adapter.variables.by_name().items()
            if variable.dtype in DTYPES
        ]

    def _differ(self, name, ranks):
        slot = self._adapter.slots[name]
        self._again[slot] = slot.steps + 1

    def compare_again(self, slot, step, scale):
        """Compare a variable in its second step and later, if it differed before the first one.

        Args:
            slot: slot of the variable.
            step: value of its step counter, a tensor.
            scale: the factor of the reduction, a tensor. When it is there, all ranks are known to
                be at this step, so none waits for the others in vain.

        Returns:
            List of tensors that must be computed before the variable is updated.
        """
        if slot not in self._again:
            return []
        # in all graphs, also in those that are traced later: ranks may have traced other ones
        variable = self._adapter.variables.by_name().get(slot.label)
        if variable is None:  # it was deleted
            return []
        collectives = self._adapter.collectives

        def compare():
            name = f"{collectives.name_for(slot)}.values"
            octets = tf.bitcast(variable.read_value(), tf.uint8)  # NumPy has no bfloat16
            own = tf.numpy_function(_checksum, [octets], tf.int64)
            sums = collectives.allgather(tf.reshape(own, [1]), name)
            compared = functools.partial(self._compare, slot)
            return tf.numpy_function(compared, [step, sums], tf.bool)

        with tf.device("CPU:0"), tf.control_dependencies([scale]):
            first = self._again[slot]
            is_due = tf.reduce_any(tf.equal(step, [first, first + _LATER]))
            return [tf.cond(is_due, compare, lambda: tf.constant(True))]

    def _compare(self, slot, step, sums):
        """Compare the checksums of a variable; warn if they differed before. Return True."""
        transport = self._adapter.transport
        others = [rank for rank, one in zip(transport.ranks, sums) if one != sums[0]]
        if others and step == self._again[slot]:
            self._differing.add(slot)
        elif others and slot in self._differing and transport.rank == 0 and not self._warned:
            self._warned = True
            warn(
                f"{ranks_text(others)} trained from other values of {slot.label} than the first"
                " rank; before the first step, or right after it, call"
                " hvd.broadcast_variables(model.variables, root_rank=0), in Keras 3 with"
                " [one.value for one in model.variables], or give model.fit"
                " hvd.callbacks.BroadcastGlobalVariablesCallback(0)"
            )
        return True


def _checksum(array):
    """Return a CRC-32 of the bytes of an array, as int64."""
    return np.int64(zlib.crc32(np.ravel(array).tobytes()))
