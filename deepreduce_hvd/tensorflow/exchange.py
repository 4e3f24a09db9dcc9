"""Communicators on TensorFlow: a group of gradients is exchanged in one call from the graph into
Python.

Allgather of built-in codecs needs none of this: there the graph's own operators encode, gather and
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
from deepreduce_hvd.compressor import collective_name
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.ops import DTYPES
from deepreduce_hvd.tensorflow.slot import local_variable


def _names_failures(collective):
    """Horovod's failures as what ``hvd.elastic.run`` goes back for.

    Within a graph they become TensorFlow's UnknownError again, of which it takes for a failure what
    names an allreduce, an allgather or a broadcast; at others training ends as if it were over.
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
    """Blocking: Horovod has no handles on TensorFlow, so a collective is over when its call
    returns, and its handle is its result.
    """

    horovod = hvd

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

    def test(self, handle):
        return True

    def wait(self, handle):
        return handle


_counter = None


def _exchanges():
    """The variable that counts the exchanges of all compressors of this process.

    Every exchange reads and writes it, so that TensorFlow runs them one after another in the order
    of the program, which is that of all ranks: exchanges of several rounds that run at once could
    each wait for a thread that the other has on another rank.
    """
    global _counter
    if _counter is None:
        with tf.init_scope(), tf.device("CPU:0"):
            _counter = local_variable(np.int64(0), name="deepreduce_exchanges")
    return _counter


class GroupExchange:
    """The exchange of one group: its gradients come in while Horovod compresses them, its sums go
    out while it decompresses.
    """

    def __init__(self, session):
        self._adapter = session
        self._slots = []
        self._gradients = []
        self._steps = []
        self._sums = None

    def add(self, slot, gradient, step):
        """Takes one gradient in, and its step as read before; returns its number in the group."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise InvalidArgumentError(
                f"compress: expected eager execution or a tf.function, which keeps exchanges in order, got a graph of tf.compat.v1; use "
                f"Allgather there instead of {self._adapter.compressor.communicator!r}"
            )
        self._slots.append(slot)
        self._steps.append(step)
        # NumPy has no bfloat16: the numbers go as they lie in memory
        self._gradients.append(
            tf.bitcast(gradient, tf.uint16) if gradient.dtype == tf.bfloat16 else gradient
        )
        return len(self._slots) - 1

    def sum_of(self, number, scale):
        """The sum of one gradient as (d,) float32; ``scale`` is the factor that Horovod's reduction
        applies to each rank's.
        """
        if self._sums is None:
            self._sums = self._run(scale)
        return self._sums[number]

    def _run(self, scale):
        """The exchange as an operation of the graph."""
        order = _exchanges()
        state = [part for slot in self._slots for part in slot.state]
        kinds = [tf.int64, *[tf.float32] * (len(self._slots) + len(state))]
        flat = [tf.reshape(gradient, [-1]) for gradient in self._gradients]
        number, *results = tf.numpy_function(
            self._exchange, [order, scale, self._steps[0], *flat, *state], kinds
        )
        updates = [order.assign(number)]
        updates += [part.assign(new) for part, new in zip(state, results[len(self._slots) :])]
        with tf.control_dependencies([*self._steps, number]):  # an exchange that fails is no step
            updates += [slot.steps_taken.assign_add(1) for slot in self._slots]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return [
                tf.ensure_shape(tf.identity(total), [slot.elements])
                for slot, total in zip(self._slots, results)
            ]

    def _exchange(self, number, scale, step, *arrays):
        """What the operation does: gradients and memories come in, sums and memories go out."""
        compressor, transport = self._adapter.compressor, self._adapter.transport
        started = time.perf_counter()
        state = iter([part.copy() for part in arrays[len(self._slots) :]])
        members = []
        for slot, gradient in zip(self._slots, arrays):
            own = tuple(next(state) for _ in slot.state)
            members.append(
                BucketMember(slot.label, gradient, own, slot.key, DTYPES[slot.dtype], slot.selected)
            )
        bucket = Bucket(
            compressor.codec, compressor.memory, members, compressor.seed, int(step), hvd.rank()
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
