"""Plans on TensorFlow: ``schedule="auto"``, and a plan that never changes."""

import dataclasses
import os
import time

import numpy as np
import tensorflow as tf

from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.planning.scheduler import Scheduler
from deepreduce_hvd.planning.step_times import StepTimes
from deepreduce_hvd.schedule.dag import THREADS
from deepreduce_hvd.tensorflow.codec_numbers import CodecNumbers
from deepreduce_hvd.tensorflow.ways import COUNT, DONE, ENCODED, READY, Undecided, in_range

#: where the seconds of encoding and of decoding are beside a slot's moments
_ENCODE, _DECODE = 4, 5


class AutoSchedule:
    """The schedule of one compressor with ``schedule="auto"``.

    Args:
        adapter: its :class:`~deepreduce_hvd.tensorflow.adapter.Adapter`.

    Attributes:
        scheduler: the :class:`~deepreduce_hvd.planning.scheduler.Scheduler`.
        is_told: whether the program has said when a step begins.
    """

    def __init__(self, adapter):
        if not tf.executing_eagerly():
            raise InvalidArgumentError(
                "Compressor schedule: expected None or a plan in a graph of tf.compat.v1, got"
                " 'auto'"
            )
        self._adapter = adapter
        self._slots = [slot for slot in adapter.slots.values() if slot.choice is not None]
        self._times = StepTimes()
        # each gradient is a message of its own, but Horovod merges those that wait, so predictions
        # of plans with larger messages are closer
        self.scheduler = Scheduler(
            adapter.compressor, self._times, _time_fp16, on_host=True, communicators=("Allgather",),
            tables=lambda: names_of(adapter.slots),
        )  # fmt: skip
        self.is_told = False
        self._tables = {}  # policy -> numbers of its codec at each step
        self._seen = np.zeros((len(self._slots), 6))
        self._read_all = tf.function(self._all_moments)
        # with one thread, backward waits while a gradient is encoded
        threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count()
        self._has_one_thread = threads == 1
        self._follow(self.scheduler.layout)

    def begin(self, slot, gradient, before, step, last_scale):
        """Build what Horovod reduces for a gradient whose way may change.

        Args:
            slot, gradient, before, step, last_scale: as for
                :class:`~deepreduce_hvd.tensorflow.ways.Undecided`.
        """
        if not self.is_told:
            raise InvalidArgumentError(
                "compress: expected to be told when steps begin and end with schedule='auto' on"
                " TensorFlow, got a gradient before the first step; write"
                " @deepreduce_hvd.tensorflow.scheduled(comp) above the training step and call it,"
                " or model.fit(...,"
                " callbacks=[deepreduce_hvd.tensorflow.schedule_callback(comp)])"
            )
        pending = Undecided(self._adapter, slot, gradient, before, step, last_scale)
        return pending.probe, pending

    def restart(self):
        """Forget all measurements, because the ranks may have changed."""
        self._times.forget()
        self.scheduler.restart()

    def profile(self):
        """Return the profile of this rank, as :meth:`Compressor.profile`."""
        return self.scheduler.profile(self._adapter.slots, self._adapter.transport.size)

    def write_timeline(self, path):
        """Write the last step as a trace, as :meth:`Compressor.timeline`."""
        self._times.write(path, self._layout.plan)

    # --- steps ---

    def step_begins(self):
        """Prepare for a step: from now on, gradients are sent as the scheduler says."""
        self.is_told = True
        if self._layout is not self.scheduler.layout:
            self._follow(self.scheduler.layout)

    def step_ends(self):
        """Record the times of a step, and let the scheduler move on by one step.

        Nothing happens if no gradient was reduced, as when gradients are accumulated.
        """
        if not self._slots:
            return
        found = self._read_all().numpy()
        seen, self._seen = self._seen, found
        came = [place for place in range(len(found)) if found[place, COUNT] != seen[place, COUNT]]
        if not came:
            return
        self._record([self._slots[place].label for place in came], found[came], seen[came])
        self.scheduler.step_ends(self._adapter.transport, self._adapter.slots)

    def _follow(self, new):
        """Send gradients as a layout says, in all graphs."""
        self._layout = new
        with tf.device("CPU:0"):
            for slot in self._slots:
                slot.policy = new.policies[slot.label]
                slot.choice.follow(slot.policy, self._table_of(slot.policy))

    def _table_of(self, policy):
        if policy.dense or not policy.codec.is_native(policy.memory):
            return None
        if policy not in self._tables:
            # variables share the memory of a tensor
            table = CodecNumbers(policy.codec, policy.memory).table()
            self._tables[policy] = tf.constant(table)
        return self._tables[policy]

    # --- times ---

    def _all_moments(self):
        """Return the moments of all slots, and their seconds beside them, (n, 6)."""
        with tf.device("CPU:0"):
            return tf.stack(
                [tf.concat([slot.choice.moments, slot.seconds.variable], 0) for slot in self._slots]
            )

    def _record(self, names, found, seen):
        """Record the times of a step.

        Args:
            names: names of the parameters that had a gradient.
            found: their moments and seconds, (n, 6).
            seen: those after the step before.
        """
        spent = (found - seen)[:, [_ENCODE, _DECODE]].tolist()
        rows = list(zip(names, found.tolist(), spent))
        times = self._times
        times.begin(min(moments[READY] for _, moments, _ in rows))
        for name, moments, (encode, _) in sorted(rows, key=lambda row: row[1][READY]):
            ready, encoded = moments[READY], moments[ENCODED]
            times.gradients((name,), name, ready, ready + encode * self._has_one_thread)
            if encode > 0 and not self._has_one_thread:
                times.encoded(name, encoded - encode, encoded)
        for name, moments, (_, decode) in sorted(rows, key=lambda row: row[1][DONE]):
            came = moments[DONE] - decode
            times.message(name, moments[ENCODED], came)
            times.result(name, came, moments[DONE], THREADS)


def lasting_layout(compressor):
    """Return the layout of a compressor whose plan never changes.

    What such a plan sends uncompressed needs no memory.
    """
    planned = layout.of_plan(compressor.policies, compressor.fingerprint, compressor.schedule)
    policies = {
        name: Policy(policy.way) if policy.dense else policy
        for name, policy in planned.policies.items()
    }
    return dataclasses.replace(planned, policies=policies)


def _time_fp16(count, device):
    """Return the seconds of converting ``count`` elements to float16, and of converting back.

    Converting includes the residual, which takes most of the time.
    """
    with tf.device("CPU:0"):
        gradient, residual = tf.zeros(count), tf.zeros(count)
        started = time.perf_counter()
        total = gradient + residual
        half = in_range(total, tf.float16, 2)
        _ = tf.reduce_all(tf.math.is_finite(total)), total - tf.cast(half, tf.float32)
        between = time.perf_counter()
        tf.cast(half, tf.float32)
    return between - started, time.perf_counter() - between
