"""Gradients whose way changes between steps: with a codec, uncompressed, or as float16.

Horovod keeps the graph of its reductions and does not trace it again when a function around it is
traced again. So with ``schedule="auto"`` a graph has all ways of each gradient, and a variable of
its slot selects the one that runs. All ways reduce one tensor through Horovod: the gradient itself
when it is sent uncompressed, otherwise the probe.
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16
from deepreduce_hvd.tensorflow.graph import after, time_after
from deepreduce_hvd.tensorflow.groups import GradientGroup, Pending
from deepreduce_hvd.tensorflow.slot import local_variable, reduced_dtype
from deepreduce_hvd.tensorflow.variables import reduces_several

#: the branches of a graph, in the order of their numbers in :attr:`Choice.way`
_WAYS = (CODEC, DENSE, FP16)
#: what :attr:`Choice.moments` contains
READY, ENCODED, DONE, COUNT = range(4)


class Choice:
    """How the next gradient of one variable is sent, and when its last one was.

    All attributes are variables, which traced graphs read and write.

    Args:
        slot: the :class:`~deepreduce_hvd.tensorflow.slot.Slot` of the variable.

    Attributes:
        way: number of the way in ``_WAYS``.
        numbers: the codec's numbers, (rows, 20): a row for each step of a schedule, the last one
            for all later steps.
        remembers: whether the residual may be nonzero.
        moments: when the last gradient was ready, when it was encoded, and when its result was
            there, as times of ``time.time``; and the number of results, (4,) float64.

    Raises:
        InvalidArgumentError: the gradients are compressed on a GPU.
    """

    def __init__(self, slot):
        if slot.home is not None:
            raise InvalidArgumentError(
                f"Compressor schedule: expected None or a plan for gradients on {slot.home}, got"
                " 'auto', which works on the host only on TensorFlow"
            )
        self.way = local_variable(np.int32(0))
        self.numbers = local_variable(np.zeros((0, 20)), shape=[None, 20])
        self.remembers = local_variable(True)
        self.moments = local_variable(np.zeros(4))

    def follow(self, policy, table):
        """Send gradients by a policy from now on.

        Args:
            policy: the :class:`~deepreduce_hvd.planning.policies.Policy`.
            table: the numbers of its codec; None without a codec of built-in stages.
        """
        self.way.assign(_WAYS.index(policy.way))
        if table is not None:
            self.numbers.assign(table)

    def at(self, step):
        """Return the numbers for the encode operator, which takes the row of its step."""
        return self.numbers.read_value()


class Undecided(Pending):
    """One gradient between compress and decompress, whose way is known when the graph runs.

    Args:
        adapter: the :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.
        slot: slot of its variable.
        gradient: the gradient.
        before: tensors that must be computed before the memory is used.

    Attributes:
        reduced: the tensor that Horovod reduces.

    Raises:
        InvalidArgumentError: Horovod reduces several gradients in one call.
    """

    def __init__(self, adapter, slot, gradient, before):
        if reduces_several():
            raise InvalidArgumentError(
                f"parameter {slot.label}: expected a message of its own with schedule='auto', got"
                " groups= of several gradients; leave out groups="
            )
        super().__init__(slot, gradient, None, 0)
        self._adapter = adapter
        self._policy = adapter.compressor.policies[slot.label]
        self._name = adapter.collectives.name_for(slot)
        with tf.device("CPU:0"):
            self.step = slot.steps_taken.read_value()
            self._ready = time_after(gradient)
            self._way = slot.choice.way.read_value()
            with tf.control_dependencies([self.step, self._ready, *before]):
                self.gradient = tf.identity(gradient)
            reduced, self._payload, self._half = tf.switch_case(
                self._way, [self._encoded, self._uncompressed, self._halved]
            )
            with tf.control_dependencies([self._payload]):
                self._encoded_at = tf.timestamp()
            self.reduced = tf.identity(reduced, name=f"{self._name}.probe")

    # --- the ways to Horovod: each returns what it reduces, a payload and a sum of float16 ---

    def _encoded(self):
        native = self._policy.codec.is_native(self._policy.memory)
        payload = self._adapter.host_path.encode(
            self.slot, self.gradient, self.slot.choice if native else None, self.step
        )
        with after([self.slot.choice.remembers.assign(True)]):
            return self._probe(), tf.identity(payload), _empty(tf.float16)

    def _uncompressed(self):
        limit = self._limit() if self.gradient.dtype == tf.float16 else None
        with after([self.slot.steps_taken.assign_add(1)]):
            return self._with_memory(limit), _empty(tf.uint8), _empty(tf.float16)

    def _halved(self):
        half = tf.cast(self._with_memory(self._limit()), tf.float16)
        with after([self.slot.steps_taken.assign_add(1)]):
            summed = self._adapter.collectives.allreduce(half, hvd.Sum, f"{self._name}.fp16")
            return self._probe(), _empty(tf.uint8), summed

    def _probe(self):
        dtype = reduced_dtype(self.gradient.dtype)
        return self._adapter.collectives.probe(self.step, dtype)

    def _limit(self):
        """Return a number whose sum over all ranks, rounded, is in the range of float16."""
        size = tf.cast(self._adapter.collectives.size, reduced_dtype(self.gradient.dtype))
        return (1 - 2.0**-10) * tf.float16.max / size  # each rank's number may be rounded up

    def _with_memory(self, limit):
        """Return the gradient plus the residual, (d,), and leave zeros as the residual.

        Args:
            limit: largest magnitude to send, or None. The residual keeps what exceeds it. It also
                stays where the gradient alone exceeds it or is not finite.
        """
        remembers = self.slot.choice.remembers
        own = tf.reshape(tf.cast(self.gradient, reduced_dtype(self.gradient.dtype)), [-1])
        if not self.slot.state:
            return own
        (residual,) = self.slot.state  # only Residual, see planning/layout.py

        def added():
            kept = tf.cast(residual.read_value(), own.dtype)
            total = own + kept
            if limit is None:
                sent, left = total, tf.where(tf.math.is_finite(own), tf.zeros_like(kept), kept)
            else:
                fits = tf.abs(own) <= limit
                sent = tf.where(fits, tf.clip_by_value(total, -limit, limit), own)
                left = tf.where(fits, total - sent, kept)
            updates = [
                residual.assign(tf.cast(left, tf.float32)),
                remembers.assign(tf.reduce_any(tf.not_equal(left, 0))),
            ]
            with after(updates):
                return tf.identity(sent)

        return tf.cond(remembers.read_value(), added, lambda: own)

    # --- the ways from Horovod ---

    def result(self, reduced):
        """Return the reduced gradient.

        Args:
            reduced: :attr:`reduced` after Horovod's reduction.
        """
        choice = self.slot.choice
        with tf.device("CPU:0"):
            result = tf.switch_case(
                self._way,
                [
                    lambda: self._decoded(reduced),
                    lambda: self._shaped(reduced),
                    lambda: self._scaled(reduced),
                ],
            )
            done = time_after(result)
            count = choice.moments.read_value()[COUNT] + 1
            moments = tf.stack([self._ready, self._encoded_at, done, count])
            with after([choice.moments.assign(moments)]):
                return tf.ensure_shape(tf.identity(result), self.slot.shape)

    def _decoded(self, reduced):
        scale, group = self._scale(reduced), GradientGroup(None, None)
        group.payloads.append(self._payload)
        with tf.control_dependencies([scale]):  # then all ranks take part
            group.gathered = self._adapter.collectives.allgather(self._payload, self._name)
        return self._adapter.host_path.decode(
            self.slot, group, self.gradient, 0, self.shape, scale, self._adapter.collectives.size
        )

    def _shaped(self, total):
        """Return a sum, (d,), as a gradient."""
        return tf.cast(tf.reshape(total, self.shape), self.dtype)

    def _scaled(self, reduced):
        """Return the sum of float16 as a gradient."""
        dtype = reduced_dtype(self.dtype)
        return self._shaped(tf.cast(self._half, dtype) * tf.cast(self._scale(reduced), dtype))

    def _scale(self, reduced):
        probe = tf.ensure_shape(reduced, [4])
        return self._adapter.collectives.scale_of(self.slot, probe, self.step)


def _empty(dtype):
    return tf.zeros([0], dtype)
