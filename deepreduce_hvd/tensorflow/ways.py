"""Gradients whose way changes between steps: with a codec, uncompressed, or as float16.

Horovod keeps the graph of its reductions and does not trace it again when a function around it is
traced again. So with ``schedule="auto"`` a graph has all ways of each gradient, and a variable of
its slot selects the one that runs. In all ways Horovod itself reduces the probe. TensorFlow runs a
branch when all of its inputs are there. The probes do not depend on gradients, so they are reduced
while forward runs, and no gradient waits for its probe.
"""

import numpy as np
import tensorflow as tf

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numerics.float16 import limit_of, unit_of
from deepreduce_hvd.schedule.dag import CODEC, DENSE, FP16
from deepreduce_hvd.tensorflow.graph import after, time_after
from deepreduce_hvd.tensorflow.groups import GradientGroup, Pending
from deepreduce_hvd.tensorflow.local_variables import local_variable
from deepreduce_hvd.tensorflow.slot import reduced_dtype
from deepreduce_hvd.tensorflow.variables import arguments_of_reduction, reduces_several

#: the branches of a graph, in the order of their numbers in :attr:`Choice.way`
_WAYS = (CODEC, DENSE, FP16)
#: for numbers of ranks
_POWERS = [1 << bits for bits in range(31)]
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
        step, last_scale: as for :class:`Pending`.

    Attributes:
        probe: the tensor that Horovod reduces.

    Raises:
        InvalidArgumentError: Horovod reduces several gradients in one call.
    """

    def __init__(self, adapter, slot, gradient, before, step, last_scale):
        if reduces_several():
            raise InvalidArgumentError(
                f"parameter {slot.label}: expected a message of its own with schedule='auto', got"
                " groups= of several gradients; leave out groups="
            )
        super().__init__(slot, gradient, None, 0, step, last_scale)
        self._collectives = adapter.collectives
        self._starting_values = adapter.starting_values
        self._host_path = adapter.host_path
        self._policy = adapter.compressor.policies[slot.label]
        self._name = self._collectives.name_for(slot)
        self._dtype = reduced_dtype(gradient.dtype)
        self._reduction = arguments_of_reduction()
        with tf.device("CPU:0"):
            probe = self._collectives.probe(step, last_scale, self._dtype)
            if slot.table is not None:
                probe = slot.table.with_last_look(probe)
            self.probe = tf.identity(probe, name=f"{self._name}.probe")
            self._ready = time_after(gradient)
            with tf.control_dependencies([step, self._ready, *before]):
                self.gradient = tf.identity(gradient)

    def result(self, probe):
        """Return the reduced gradient.

        Args:
            probe: the probe after Horovod's reduction.
        """
        choice, table = self.slot.choice, self.slot.table
        with tf.device("CPU:0"):
            self._scale = self._collectives.scale_of(
                self.slot, probe[: wire.PROBE_NUMBERS], self.step, self.last_scale
            )
            if table is not None:
                table.decide(probe[wire.PROBE_NUMBERS :], self._scale)
            compared = self._starting_values.compare_again(self.slot, self.step, self._scale)
            with tf.control_dependencies([self._scale, *compared]):  # then all ranks take part
                way = choice.way.read_value()
                if table is not None:  # part of no plan
                    way = tf.where(table.is_known_table(), _WAYS.index(CODEC), way)
            result, encoded = tf.switch_case(
                way, [self._compressed, self._uncompressed, self._halved]
            )
            done = time_after(result)
            count = choice.moments.read_value()[COUNT] + 1
            moments = tf.stack([self._ready, encoded, done, count])
            with after([choice.moments.assign(moments)]):
                return tf.ensure_shape(tf.identity(result), self.slot.shape)

    # --- the ways: each returns the reduced gradient, and when it was encoded ---

    def _compressed(self):
        slot, group = self.slot, GradientGroup(None, None)
        if slot.table is not None:
            slot.table.look_for_next_probe(self.gradient)
        native = self._policy.codec.is_native(self._policy.memory)
        numbers = slot.choice if native else None
        group.payloads.append(self._host_path.encode(slot, self.gradient, numbers, self.step))
        encoded = time_after(group.message)
        with after([slot.choice.remembers.assign(True)]):
            group.gathered = self._collectives.gather_messages(group.message, self._name)
        result = self._host_path.decode(
            slot, group, self.gradient, 0, self.shape, self._scale, self._collectives.size
        )
        return result, encoded

    def _uncompressed(self):
        return self._reduced(self._with_memory(self._dtype), DENSE)

    def _halved(self):
        return self._reduced(self._with_memory(tf.float16), FP16)

    def _reduced(self, sent, way):
        encoded = time_after(sent)
        with after([self.slot.steps_taken.assign_add(1)]):
            # as Horovod reduces the probe
            reduced = self._collectives.allreduce(
                sent, name=f"{self._name}.{way}", **self._reduction
            )
        return tf.cast(tf.reshape(reduced, self.shape), self.dtype), encoded

    def _with_memory(self, message):
        """Return what to send for the gradient and the residual, (d,).

        The residual keeps what the message cannot carry: what float16 rounds, and what would exceed
        its range in the sum over all ranks. It stays as it is if the gradient has NaN or Inf, which
        is then sent alone.

        Args:
            message: dtype of the message.
        """
        remembers = self.slot.choice.remembers
        own = tf.reshape(tf.cast(self.gradient, self._dtype), [-1])
        if not self.slot.state:
            return tf.cast(own, message)
        (residual,) = self.slot.state  # only Residual, see planning/layout.py

        def added():
            kept = tf.cast(residual.read_value(), own.dtype)
            total = own + kept
            finite = tf.reduce_all(tf.math.is_finite(total))
            sent, left, empty = total, tf.zeros_like(kept), True
            if tf.float16 in (message, self.dtype):
                sent = in_range(total, message, self._collectives.size)
                left, empty = total - tf.cast(sent, total.dtype), False
            updates = [
                residual.assign(tf.cast(tf.where(finite, left, kept), tf.float32)),
                remembers.assign(tf.logical_not(finite) if empty else True),
            ]
            with after(updates):
                return tf.where(finite, sent, tf.cast(own, message))

        if message == tf.float16:  # float16 always rounds
            return added()
        return tf.cond(remembers.read_value(), added, lambda: own)


def in_range(total, dtype, size):
    """Return ``total`` as ``dtype``, such that sums over all ranks are in the range of float16.

    Args:
        total: (d,) numbers of float32 or float64.
        dtype: dtype of the message. Horovod divides sums of float16 as float16.
        size: number of ranks, an integer or an int32 tensor.
    """
    count = tf.cast(size, total.dtype)
    limit = limit_of(count)
    if dtype == tf.float16:
        powers = tf.constant(_POWERS, total.dtype)
        power = tf.reduce_min(tf.where(powers >= count, powers, powers[-1]))
        unit = unit_of(count, power)
        total = tf.round(total / unit) * unit
    return tf.cast(tf.clip_by_value(total, -limit, limit), dtype)
