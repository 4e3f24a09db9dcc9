"""Communicators on TensorFlow: a group of gradients is exchanged in one call from the graph into Python.

Allgather of built-in codecs needs none of this: there the graph's own operators encode, gather and decode.
"""

import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.job import Job, Member
from deepreduce_hvd.communicators.process_sets import ProcessSetTransport
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.tensorflow import DTYPES


class HorovodTransport(ProcessSetTransport):
    """Blocking: Horovod has no handles on TensorFlow, so a collective is over when its call returns, and its handle is its result."""

    horovod = hvd

    def allgather(self, array, name):
        return hvd.allgather(tf.constant(array), name=name, ignore_name_scope=True, process_set=self.process_set).numpy()

    def alltoall(self, parts, name):
        splits = tf.constant([part.size for part in parts], tf.int32)
        received, splits = hvd.alltoall(
            tf.constant(np.concatenate(parts)), splits, name=name, ignore_name_scope=True, process_set=self.process_set
        )
        return np.split(received.numpy(), np.cumsum(splits.numpy())[:-1])

    def allreduce(self, array, name):
        return hvd.allreduce(tf.constant(array), op=hvd.Sum, name=name, process_set=self.process_set).numpy()

    def test(self, handle):
        return True

    def wait(self, handle):
        return handle


class GroupExchange:
    """The exchange of one group: its gradients come in while Horovod compresses them, its sums go out while it decompresses."""

    def __init__(self, session):
        self._session = session
        self._slots = []
        self._gradients = []
        self._sums = None

    def add(self, slot, gradient):
        """Takes one gradient in; returns its number in the group."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise InvalidArgument(
                f"compress: expected eager execution or a tf.function, which keeps exchanges in order, got a graph of tf.compat.v1; use "
                f"Allgather there instead of {self._session.compressor.communicator!r}"
            )
        self._slots.append(slot)
        # NumPy has no bfloat16: the numbers go as they lie in memory
        self._gradients.append(tf.bitcast(gradient, tf.uint16) if gradient.dtype == tf.bfloat16 else gradient)
        return len(self._slots) - 1

    def sum_of(self, number, scale):
        """The sum of one gradient as (d,) float32; ``scale`` is the factor that Horovod's reduction applies to each rank's."""
        if self._sums is None:
            self._sums = self._run(scale)
        return self._sums[number]

    def _run(self, scale):
        """The exchange as an operation of the graph; a counter in a variable keeps those of a step one after another, as on all ranks."""
        order = self._session.exchanges
        steps = [slot.steps_taken for slot in self._slots]
        state = [part for slot in self._slots for part in slot.state]
        kinds = [tf.int64, *[tf.float32] * (len(self._slots) + len(state))]
        flat = [tf.reshape(gradient, [-1]) for gradient in self._gradients]
        number, *results = tf.numpy_function(self._exchange, [order, scale, steps[0], *flat, *state], kinds)
        updates = [order.assign(number)]
        updates += [part.assign(new) for part, new in zip(state, results[len(self._slots) :])]
        updates += [counter.assign_add(1) for counter in steps]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return [tf.ensure_shape(tf.identity(total), [slot.elements]) for slot, total in zip(self._slots, results)]

    def _exchange(self, number, scale, step, *arrays):
        """What the operation does: gradients and memories come in, sums and memories go out."""
        compressor, transport = self._session.compressor, self._session.transport
        started = time.perf_counter()
        state = iter([part.copy() for part in arrays[len(self._slots) :]])
        members = []
        for slot, gradient in zip(self._slots, arrays):
            own = tuple(next(state) for _ in slot.state)
            members.append(Member(slot.label, gradient, own, slot.key, DTYPES[slot.dtype], slot.selected))
        job = Job(compressor.codec, compressor.memory, members, compressor.seed, int(step), hvd.rank())
        compressor.communicator.prepare(transport)
        exchange = Exchange(compressor.communicator, job, transport, f"deepreduce.{self._slots[0].label}")
        total = exchange.finish()
        encoded = time.perf_counter()
        sums = [np.zeros(member.gradient.size, np.float32) for member in members]
        for place, out in enumerate(sums):
            total.add_to(place, out, float(scale))
        spent = encoded - started, time.perf_counter() - encoded
        for slot in self._slots:
            slot.count_exchange(exchange, *spent)
        return [np.int64(number + 1), *sums, *(part for member in members for part in member.state)]
