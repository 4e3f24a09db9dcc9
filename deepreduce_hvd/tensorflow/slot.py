"""State that the compressor keeps per TensorFlow variable.

It is in tf.Variables that are created once, so retracing a function keeps it.
"""

import math

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import eager_mode
from tensorflow.python.framework.ops import EagerTensor

from deepreduce_hvd import statistics
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.tensorflow.local_variables import local_variable, read, write


class Slot(tf.Module):
    """State and statistics of one named variable.

    A checkpoint saves ``steps_taken`` and the memory.

    Args:
        policy: the :class:`~deepreduce_hvd.planning.policies.Policy` of its gradients.
        home: GPU that has the memory, or None for the host.
        payload_on_gpu: whether the last payload is on that GPU too.
        follows_loss_scale: whether the memory is in units of the scaled loss. A second copy then
            undoes void steps.
    """

    def __init__(
        self,
        name,
        parameter,
        key,
        policy,
        home=None,
        payload_on_gpu=False,
        follows_loss_scale=False,
    ):
        super().__init__()
        self.label = name
        self.key = key
        self.shape = tuple(tf.TensorShape(parameter.shape).as_list())
        self.elements = math.prod(self.shape)
        self.policy = policy
        #: the :class:`~deepreduce_hvd.tensorflow.ways.Choice` of a way that may change, or None
        self.choice = None
        #: whether the variable was not trainable when the compressor was created
        self.frozen = not getattr(parameter, "trainable", True)
        self.home = None if policy.dense else home
        self.payload_home = self.home if payload_on_gpu and self.home else "CPU:0"
        self.dtype = tf.as_dtype(parameter.dtype).base_dtype  # of the last gradient traced
        #: whether its gradients are exchanged, as eager calls and traced graphs show
        self.reduced = False
        #: whether its gradients are averaged or summed, one of ``wire.REDUCTIONS``
        self.reduction = None
        #: the :class:`~deepreduce_hvd.tensorflow.embedding_tables.TableState` if its variable may
        #: be an embedding table that gets another codec, or None
        self.table = None
        self.follows_loss_scale = follows_loss_scale
        #: last OptimizerStep with a gradient of this variable
        self.step = None
        #: whether a step with a loss scale has begun in this job
        self.has_begun = False
        self.state_names = policy.memory.state
        with tf.device(self.home or "CPU:0"):
            self.state = [
                local_variable(tf.zeros(self.elements), name=f"deepreduce_{kind}")
                for kind in self.state_names
            ]
        self.steps_taken = local_variable(np.int64(0), name="deepreduce_steps")
        #: how many of ``steps`` are of another job and not timed; less than 0 if steps went back
        self.untimed_steps = 0
        if follows_loss_scale:  # loss scale of the last step; 0 before the first
            self.scale = local_variable(np.float64(0), name="deepreduce_loss_scale")

        def untracked(value, **options):  # hidden from checkpoints
            return _Untracked(local_variable(value, **options))

        # magnitude of the last k-th largest element: a hint that saves a pass over the gradient and
        # never changes the payload
        self.threshold = untracked(np.float32(0))
        if follows_loss_scale:  # the one that ranks compare in the next step; 0: they compare none
            self.compared_scale = untracked(np.float64(0))
            # number of the last OptimizerStep with a gradient of this variable; 0 before the first
            self.reduced_in = untracked(np.int64(0))
        self.seconds = untracked(np.zeros(2))
        with tf.device(self.home or "CPU:0"):
            self._copies = _Untracked(
                [local_variable(tf.zeros(self.elements)) for _ in self.state]
                if follows_loss_scale
                else []
            )
        with tf.device(self.payload_home):
            self.payload = untracked(np.zeros(0, np.uint8), shape=[None])
        # the same as ``threshold``, for exchanges that select in Python
        self.selected = np.zeros(1, np.float32)
        self._exchanged = _Exchanged()

    @property
    def dense(self):
        """Whether its last gradient was sent uncompressed, by the policy."""
        return self.policy.dense

    @property
    def is_table(self):
        """Whether the ranks have found it to be an embedding table; None if that is not known."""
        return None if self.table is None else self.table.is_table

    @is_table.setter
    def is_table(self, known):
        if self.table is not None:
            self.table.is_table = known

    def scale_to_compare(self):
        """Return the loss scale that ranks compare in this step, a float64 tensor of shape ()."""
        with tf.device("CPU:0"):
            if not self.follows_loss_scale:
                return tf.constant(0, tf.float64)
            return self.compared_scale.variable.read_value()

    def move_to_host(self):
        """Move the memory from a GPU to the host, where slices are compressed."""
        with tf.init_scope(), tf.device("CPU:0"):
            # a tf.compat.v1 graph that is being built has not run
            values = [
                read(part) if tf.executing_eagerly() else tf.zeros(self.elements)
                for part in self.state
            ]
            self.state = [
                local_variable(value, name=f"deepreduce_{kind}")
                for kind, value in zip(self.state_names, values)
            ]
            self._copies = _Untracked(
                [local_variable(tf.zeros(self.elements)) for _ in self.copies]
            )
            self.payload = _Untracked(local_variable(np.zeros(0, np.uint8), shape=[None]))
        self.home, self.payload_home = None, "CPU:0"

    def release(self):
        """Free the memory of a variable that no longer exists, or of a closed compressor.

        Horovod keeps every compressor alive forever, and the graphs that refer to these variables.
        After this call the variables are empty, and the operators refuse empty ones. This includes
        slots without a memory, whose only array is the threshold.
        """
        parts = [*self.state, *self.copies, self.threshold.variable, self.payload.variable]
        parts += [] if self.table is None else [self.table.used_before]
        # a tf.compat.v1 graph owns its variables
        if not isinstance(parts[-1].handle, EagerTensor):
            return
        with eager_mode():  # a graph may be under construction when the last reference is dropped
            for part in parts:
                with tf.device(part.device):
                    tf.raw_ops.AssignVariableOp(
                        resource=part.handle, value=tf.zeros([0], part.dtype)
                    )

    @property
    def records(self):
        """The handles that the encode operator takes as ``records``."""
        return [
            self.steps_taken.handle,
            *(part.variable.handle for part in (self.threshold, self.seconds, self.payload)),
        ]

    @property
    def copies(self):
        """The memory before the last step; empty without ``loss_scale=``."""
        return self._copies.variable

    def restore(self):
        """Undo the last step."""
        for part, copy in zip(self.state, self.copies):
            write(part, read(copy))
        self.memory_changes()

    def memory_changes(self):
        """Note that the memory was written outside of graphs and may be nonzero."""
        if self.choice is not None:
            write(self.choice.remembers, True)
        if self.table is not None:
            self.table.residual_changes()

    @property
    def loss_scale(self):
        """Loss scale of the last step, which the memory is scaled by; None if there is none."""
        scale = float(read(self.scale)) if self.follows_loss_scale else 0.0
        return scale if scale > 0 else None

    @loss_scale.setter
    def loss_scale(self, value):
        if self.follows_loss_scale:
            write(self.scale, np.float64(value or 0.0))

    @property
    def steps(self):
        return int(read(self.steps_taken))

    def set_steps(self, steps):
        """Continue after the steps of another job, which this one has not timed."""
        self.untimed_steps += steps - self.steps
        write(self.steps_taken, steps)

    def memory(self):
        return {kind: read(part) for kind, part in zip(self.state_names, self.state)}

    @staticmethod
    def numpy_of(value):
        """Return a NumPy array, eager tensor or variable as a NumPy array; otherwise None."""
        if isinstance(value, np.ndarray):
            return value
        return (
            value.numpy()
            if isinstance(value, (tf.Tensor, tf.Variable)) and hasattr(value, "numpy")
            else None
        )

    def set_memory(self, arrays):
        self.step = None
        write(self.threshold.variable, np.float32(0))
        for kind, part in zip(self.state_names, self.state):
            write(part, arrays[kind])
        self.memory_changes()

    def count_exchange(self, exchange, encode_seconds, decode_seconds):
        """Count this variable's share, by elements, of a group's exchange."""
        last = self._exchanged
        last.share = self.elements / max(exchange.bucket.d, 1)
        last.sent_bytes, last.rounds, last.scheme = (
            exchange.channel.sent_bytes,
            exchange.channel.rounds,
            exchange.bucket.scheme,
        )
        last.encode_seconds += encode_seconds * last.share
        last.decode_seconds += decode_seconds * last.share

    @property
    def encode_seconds(self):
        """Seconds of encoding in all steps."""
        return float(read(self.seconds.variable)[0]) + self._exchanged.encode_seconds

    @property
    def decode_seconds(self):
        """Seconds of decoding in all steps."""
        return float(read(self.seconds.variable)[1]) + self._exchanged.decode_seconds

    @property
    def payload_bytes(self):
        """Bytes of the last payload; None if there was none."""
        return int(read(self.payload.variable).size) or None

    def statistics(self):
        """Return one row of Compressor.stats()."""
        last = self._exchanged
        payload = read(self.payload.variable)
        communicator: str | None = "Allgather()"
        sent_bytes, rounds = payload.size, 1
        if last.rounds:
            sent_bytes, rounds, communicator = (
                round(last.sent_bytes * last.share),
                last.rounds,
                last.scheme,
            )
        probe_bytes = wire.PROBE_BYTES * reduced_dtype(self.dtype).size // 4
        if self.table is not None and self.table.probes:  # two numbers more than wire.PROBE_NUMBERS
            probe_bytes += 2 * reduced_dtype(self.dtype).size
        sent_bytes += probe_bytes
        path, dense = "compressed", self.dense and not self.is_table
        if dense and self.reduced:
            sent_bytes, rounds, communicator, path = (
                self.elements * sent_dtype(self.dtype, self.policy.way).size,
                0,
                None,
                self.policy.way,
            )
            if self.choice is not None:
                sent_bytes += probe_bytes
        elif dense or (payload.size == 0 and not last.rounds):
            sent_bytes, rounds, communicator, path = 0, 0, None, "none"
        keeps_everything = not dense and self.policy.memory.keeps_everything
        return statistics.row(
            self.elements, self.elements * self.dtype.size, sent_bytes, self.steps,
            self.encode_seconds, self.decode_seconds,
            path=path, payload=None if dense or payload.size == 0 else payload,
            kept=read(self.state[0]) if keeps_everything and not self.is_table else None,
            rounds=rounds, communicator=communicator, untimed_steps=self.untimed_steps,
        )  # fmt: skip


class _Exchanged:
    """Statistics of the exchanges in Python of one variable: of the last one, and total seconds."""

    sent_bytes = 0
    rounds = 0
    scheme = None
    share = 0.0
    encode_seconds = 0.0
    decode_seconds = 0.0


class _Untracked:
    """Hide a variable, or a list of variables, from checkpoints."""

    def __init__(self, variable):
        self.variable = variable


def sent_dtype(dtype, way):
    """Return the dtype that Horovod reduces for uncompressed gradients of ``dtype``.

    Args:
        way: "dense" or "fp16".
    """
    return tf.float16 if way == FP16 else reduced_dtype(dtype)


def reduced_dtype(dtype):
    """Return the dtype that Horovod reduces for gradients of ``dtype``.

    Horovod's allreduce has no bfloat16 on the host, and the probe needs 24 bits.
    """
    return tf.float64 if dtype == tf.float64 else tf.float32
