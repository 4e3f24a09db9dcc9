"""Communicators on TensorFlow: the graph calls Python once to exchange a group of gradients.

Allgather with built-in codecs does not need this: the graph's own operators encode, gather and
decode.
"""

import functools
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.process_sets import ProcessSetTransport
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.graph import without_derivative
from deepreduce_hvd.tensorflow.local_variables import local_variable
from deepreduce_hvd.tensorflow.ops import DTYPES


def _names_failures(collective):
    """Wrap a collective: raise Horovod's failures as errors that ``hvd.elastic.run`` handles.

    Within a graph they become TensorFlow's UnknownError. ``hvd.elastic.run`` treats that as a
    failure of Horovod only if its message names an allreduce, an allgather or a broadcast. Any
    other error would end training as if it were complete.
    """

    @functools.wraps(collective)
    def call(*arguments):
        try:
            return collective(*arguments)
        except tf.errors.UnknownError as error:
            raise HorovodInternalError(
                f"HorovodAllreduce or another collective failed: {error.message}"
            ) from error

    return call


class HorovodTransport(ProcessSetTransport):
    """Blocking transport: Horovod has no handles on TensorFlow.

    A collective is done when its call returns. Its handle is its result.
    """

    horovod = hvd
    merges_sums = False  # the next one starts when the one before is done

    @_names_failures
    def allgather(self, array, name):
        return hvd.allgather(
            tf.constant(array), name=name, ignore_name_scope=True, process_set=self.process_set
        ).numpy()

    @_names_failures
    def alltoall(self, parts, name):
        splits = tf.constant([part.size for part in parts], tf.int32)
        received, splits = hvd.alltoall(
            tf.constant(np.concatenate(parts)),
            splits,
            name=name,
            ignore_name_scope=True,
            process_set=self.process_set,
        )
        return np.split(received.numpy(), np.cumsum(splits.numpy())[:-1])

    @_names_failures
    def allreduce(self, array, name):
        return hvd.allreduce(
            tf.constant(array), op=hvd.Sum, name=name, process_set=self.process_set
        ).numpy()

    def allreduce_in_place(self, array, name):
        """Sum as gradients are summed, which leaves the array as it is on TensorFlow."""
        return self.allreduce(array, name)

    def test(self, handle):
        return True

    def wait(self, handle):
        return handle


_counter = None


def _exchanges():
    """Return the variable that counts the exchanges of all compressors of this process.

    Every exchange reads and writes it. So TensorFlow runs exchanges one after another in program
    order, which is the same on all ranks. Otherwise two exchanges of several rounds could deadlock:
    each could hold the thread that the other needs on another rank.
    """
    global _counter
    if _counter is None:
        with tf.init_scope(), tf.device("CPU:0"):
            _counter = local_variable(np.int64(0), name="deepreduce_exchanges")
    return _counter


class GroupExchange:
    """The exchange of one group of gradients.

    Gradients are added while Horovod compresses, sums are taken while it decompresses.
    """

    def __init__(self, adapter):
        self._adapter = adapter
        self._slots = []
        self._gradients = []
        self._steps = []
        self._sums = None

    def add(self, slot, gradient, step):
        """Add a gradient and the value of its step counter; return its number in the group."""
        if not tf.config.experimental.get_synchronous_execution():
            raise InvalidArgumentError(
                "compress: expected synchronous execution, because exchanges run eagerly within a"
                " graph, got tf.config.experimental.set_synchronous_execution(False); leave that"
                f" out, or use Allgather instead of {self._adapter.compressor.communicator!r}"
            )
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise InvalidArgumentError(
                "compress: expected eager execution or a tf.function, which run exchanges in"
                " order, got a graph of tf.compat.v1; use Allgather instead of"
                f" {self._adapter.compressor.communicator!r}"
            )
        self._slots.append(slot)
        self._steps.append(step)
        self._gradients.append(gradient)
        return len(self._slots) - 1

    def sum_of(self, number, scale):
        """Return the sum of one gradient as (d,) float32.

        ``scale`` is the factor that Horovod's reduction applies to each rank's gradient.
        """
        if self._sums is None:
            self._sums = self._run(scale)
        return self._sums[number]

    def _run(self, scale):
        """Build the operation of the graph for the exchange, and its updates of state."""
        order = _exchanges()
        state = [part for slot in self._slots for part in slot.state]
        kinds = [tf.int64, *[tf.float32] * (len(self._slots) + len(state))]
        # NumPy has no bfloat16: pass the bits as uint16
        flat = [
            tf.bitcast(gradient, tf.uint16) if gradient.dtype == tf.bfloat16 else gradient
            for gradient in (tf.reshape(gradient, [-1]) for gradient in self._gradients)
        ]
        number, *results = tf.numpy_function(
            self._exchange, [order, scale, self._steps[0], *flat, *state], kinds
        )
        updates = [order.assign(number)]
        updates += [part.assign(new) for part, new in zip(state, results[len(self._slots) :])]
        # a failed exchange does not count as a step
        with tf.control_dependencies([*self._steps, number]):
            updates += [slot.steps_taken.assign_add(1) for slot in self._slots]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return [
                tf.ensure_shape(without_derivative(total, gradient), [slot.elements])
                for slot, total, gradient in zip(self._slots, results, self._gradients)
            ]

    def _exchange(self, number, scale, step, *arrays):
        """Run the exchange: take gradients and memories, return sums and memories."""
        compressor, transport = self._adapter.compressor, self._adapter.transport
        compressor.adapter.expect_open()
        started = time.perf_counter()
        state = iter([part.copy() for part in arrays[len(self._slots) :]])
        members = []
        for slot, given, gradient in zip(self._slots, self._gradients, arrays):
            own = tuple(next(state) for _ in slot.state)
            # not the slot's dtype, which is that of the graph that was traced last
            dtype = DTYPES[given.dtype]
            members.append(BucketMember(slot.label, gradient, own, slot.key, dtype, slot.selected))
        policy = self._slots[0].policy  # all have the same
        bucket = Bucket(
            policy.codec, policy.memory, members, compressor.seed, int(step), hvd.rank()
        )
        compressor.communicator.prepare(transport)
        exchange = Exchange(
            compressor.communicator,
            bucket,
            transport,
            collective_name(compressor.number, self._slots[0].label),
        )
        total = exchange.finish()
        encoded = time.perf_counter()
        sums = [np.zeros(member.gradient.size, np.float32) for member in members]
        for place, out in enumerate(sums):
            total.add_to(place, out, float(scale))
        spent = encoded - started, time.perf_counter() - encoded
        for slot in self._slots:
            slot.count_exchange(exchange, *spent)
        return [np.int64(number + 1), *sums, *(part for member in members for part in member.state)]
