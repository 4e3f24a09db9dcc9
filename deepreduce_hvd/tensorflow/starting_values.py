"""Whether all ranks train from the same values of the variables.

Programs broadcast the variables before their first step, or after it, because an optimizer creates
variables of its own in it. So if the values differ before the first step, they are compared once
more in the second one. Ranks that still differ have not been made equal, and would never be.
"""

import functools
import zlib

import numpy as np
import tensorflow as tf

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.coordination.settings import Setting
from deepreduce_hvd.tensorflow.local_variables import read
from deepreduce_hvd.tensorflow.ops import DTYPES
from deepreduce_hvd.user_warnings import warn


class StartingValues:
    """The comparison of one compressor.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._again = {}  # slot -> its step counter when its variable is compared once more
        self._warned = False

    def setting(self):
        """Return the setting with a checksum of each variable, for the handshake."""
        sums = [
            f"{name} {_checksum(read(variable))}"
            for name, variable in self._adapter.variables.by_name().items()
            if variable.dtype in DTYPES
        ]
        return Setting("values of variables", sums, self._differ)

    def _differ(self, ranks):
        self._again = {slot: slot.steps + 1 for slot in self._adapter.slots.values()}

    def compare_again(self, slot, step, scale):
        """Compare a variable in its second step, if values differed before the first one.

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
            return tf.numpy_function(functools.partial(self._compare, slot), [sums], tf.bool)

        with tf.device("CPU:0"), tf.control_dependencies([scale]):
            is_second = tf.equal(step, self._again[slot])
            return [tf.cond(is_second, compare, lambda: tf.constant(True))]

    def _compare(self, slot, sums):
        """Warn if the checksums of a variable differ; return whether they are equal."""
        transport = self._adapter.transport
        others = [rank for rank, one in zip(transport.ranks, sums) if one != sums[0]]
        if others and transport.rank == 0 and not self._warned:
            self._warned = True
            warn(
                f"{ranks_text(others)} trained from other values of {slot.label} than the first"
                " rank; before the first step, or right after it, call"
                " hvd.broadcast_variables(model.variables, root_rank=0), or give model.fit"
                " hvd.callbacks.BroadcastGlobalVariablesCallback(0)"
            )
        return not others


def _checksum(array):
    """Return a CRC-32 of the bytes of an array, as int64."""
    return np.int64(zlib.crc32(np.ravel(array).tobytes()))
