"""The TensorFlow adapter of a Compressor: its variables' state and its exchanges.

Horovod calls compress and decompress eagerly, or while a graph is traced. In a graph they build
operators. The state is in tf.Variables, which the operators update in place when the graph runs.
"""

import weakref
import zlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import notification_manager

from deepreduce_hvd import checkpoint, container, numpy_backend as neutral, wire
from deepreduce_hvd.base_adapter import BaseAdapter
from deepreduce_hvd.communicators import Allgather
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.elastic import expect_keeper
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.tensorflow.device import DevicePath
from deepreduce_hvd.tensorflow.exchange import GroupExchange, HorovodTransport
from deepreduce_hvd.tensorflow.graph import (
    is_elastic,
    rank_of_job,
    ranks_of,
    refuse_xla,
    size_of,
    stack,
)
from deepreduce_hvd.tensorflow.ops import DTYPES, checked, operators
from deepreduce_hvd.tensorflow.rounds import Rounds
from deepreduce_hvd.tensorflow.schedule import CodecNumbers
from deepreduce_hvd.tensorflow.slot import Identity, Slot, reduced_dtype
from deepreduce_hvd.tensorflow.variables import (
    Variables,
    View,
    expect_variable,
    reducing_process_set,
)
from deepreduce_hvd.tensorflow.waits import watch

#: number of variables whose step counters the watch on waits reads
_STEPS_READ = 3


class _Group:
    """The gradients of one message.

    They are all gradients that Horovod compresses before it decompresses the first of them.
    """

    def __init__(self, graph, exchange):
        self.graph = graph
        self.payloads = []
        self.slots = []
        self.gathered = None
        self.lengths = None  # lengths of the gathered messages, if a GPU decodes some
        self.exchange = exchange  # a GroupExchange; None with Allgather


class _Pending:
    """One gradient between compress and decompress."""

    def __init__(self, slot, tensor, group, member, step=None):
        self.slot = slot
        self.step = step
        self.gradient = tensor
        self.dtype = tensor.dtype
        self.shape = (
            tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor, out_type=tf.int64)
        )
        self.group = group
        self.member = member


class Adapter(BaseAdapter):
    """The TensorFlow side of one Compressor."""

    def __init__(self, compressor, named):
        if compressor.writer is not None:
            raise InvalidArgumentError(
                "Compressor writer: expected None on TensorFlow, got a writer; write scalars of stats() with tf.summary"
            )
        self.compressor = compressor
        self.transport = HorovodTransport(compressor.process_set)
        self.process_set = self.transport.process_set
        self.device_path = DevicePath(compressor)
        self.rounds = Rounds(compressor.loss_scale)
        with tf.init_scope(), tf.device("CPU:0"):
            self.slots = {name: self._make_slot(name, parameter) for name, parameter in named}
            native = compressor.codec.is_native(compressor.memory)
            self._numbers = CodecNumbers(compressor.codec, compressor.memory) if native else None
            self.variables = Variables()
            for name, parameter in named:
                self.variables.add(parameter, self.slots[name])
        #: the object that tf.train.Checkpoint saves
        self.trackable = tf.Module()
        self.trackable.slots = self.slots
        self.trackable.identity = Identity(self)
        self._views = {}  # slots -> their View
        #: the MemoryKeeper in elastic training, or None
        self.elastic = None
        self._expecting = weakref.WeakSet()
        self._group = None
        self.watcher = watch(self)
        if tf.compat.v1.executing_eagerly_outside_functions():
            handshake.register(self)
        # a tf.compat.v1 graph runs nothing while it is built, and no other compressor can read its
        # variables
        else:
            self.agreed = True

    def progress(self):
        """Return the number of steps that this compressor has begun.

        Return 0 in a tf.compat.v1 graph, where the counters cannot be read.
        """
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return 0
        compressed = [slot for slot in self.slots.values() if not slot.dense]
        return max((slot.steps for slot in compressed[:_STEPS_READ]), default=0)

    def _make_slot(self, name, parameter):
        shape = tf.TensorShape(getattr(parameter, "shape", None))
        if not shape.is_fully_defined() or not hasattr(parameter, "dtype"):
            raise InvalidArgumentError(
                f"Compressor parameter {name}: expected a variable of known shape, got {type(parameter).__name__} of shape {shape}"
            )
        if shape.num_elements() > container.MAX_ELEMENTS:
            raise InvalidArgumentError(
                f"Compressor parameter {name}: expected at most {container.MAX_ELEMENTS} elements, got {shape.num_elements()}; split the variable"
            )
        home = self.device_path.home(parameter)
        return Slot(
            name, parameter, zlib.crc32(name.encode()), self.compressor.memory, self.compressor.dense_below, home, self.device_path.nccl,
            self.rounds.active,
        )  # fmt: skip

    # --- views ---

    def bound_to(self, variables):
        """Return the view of the compressor for gradients of these variables only.

        The same variables give the same view object, because Horovod caches graphs by compression
        object.
        """
        slots = tuple(self._slot_of(variable, "bound_to") for variable in variables)
        if not slots:
            raise InvalidArgumentError("bound_to: expected at least one variable, got none")
        return self._views.setdefault(slots, View(self, slots))

    def _slot_of(self, variable, caller):
        slot = self.variables.slot_of(variable)
        if slot is None:
            raise InvalidArgumentError(
                f"{caller}: expected variables that the compressor was given, got {getattr(variable, 'name', variable)}"
            )
        return slot

    # --- compress ---

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor, slots=None):
        """Start the exchange of one gradient.

        Args:
            tensor: the gradient.
            slots: tuple of the slots that it can belong to; None for all.
        """
        if tensor.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"compress: expected a gradient of {', '.join(dtype.name for dtype in DTYPES)}, got {tensor.dtype.name}"
            )
        refuse_xla()
        self._expect_keeper()
        self._agree()
        slot, variable = self.variables.find(
            tensor, tuple(self.slots.values()) if slots is None else slots
        )
        slot.dtype = tensor.dtype
        begun = self.rounds.begin(slot)
        if slot.dense:
            with tf.control_dependencies(begun):
                return tf.cast(tensor, reduced_dtype(tensor.dtype)), _Pending(slot, tensor, None, 0)
        if variable is not None:
            tensor = expect_variable(tensor, slot, variable)
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        group = self._group
        if group is None or group.graph is not graph or slot in group.slots:
            in_graph = isinstance(self.compressor.communicator, Allgather)
            group = self._group = _Group(graph, None if in_graph else GroupExchange(self))
        group.slots.append(slot)
        with tf.device("CPU:0"):
            step = slot.steps_taken.read_value()  # before the encoder increments it
            probe = tf.identity(
                self._probe(step, reduced_dtype(tensor.dtype)), name=f"{self._name(slot)}.probe"
            )
            if group.exchange is not None:
                return probe, _Pending(
                    slot, tensor, group, group.exchange.add(slot, tensor, step), step
                )
            with tf.control_dependencies([step, *begun]):
                payload = self._encode(slot, tensor, step)
        group.payloads.append(payload)
        return probe, _Pending(slot, tensor, group, len(group.payloads) - 1, step)

    def _encode(self, slot, tensor, step):
        compressor = self.compressor
        position = [compressor.seed, 0, slot.key, rank_of_job()]
        if slot.home is not None:
            return self.device_path.encode(
                slot,
                tensor,
                self._numbers,
                lambda step: stack([position[0], step, *position[2:]], tf.int64),
            )
        if compressor.codec.is_native(compressor.memory):
            handles = [part.handle for part in slot.state]
            return checked(
                operators.deepreduce_encode,
                tensor,
                self._numbers.at(step),
                stack(position, tf.int64),
                handles,
                slot.records,
            )

        def encode(gradient, steps, rank, *state):
            state = [part.copy() for part in state]
            try:
                payload, _ = neutral.encode_numpy(
                    compressor.codec, compressor.memory, gradient, state, 0.0, compressor.seed, int(steps), slot.key, int(rank),
                    dtype=DTYPES[tensor.dtype],
                )  # fmt: skip
            # catch everything: the other ranks must get a notice instead of waiting
            except Exception as error:
                payload = wire.notice(error)
            return [payload, *state]

        gradient = tf.reshape(tf.cast(tensor, reduced_dtype(tensor.dtype)), [-1])
        kinds = [tf.uint8, *[tf.float32] * len(slot.state)]
        encoded = tf.numpy_function(
            encode, [gradient, slot.steps_taken, position[3], *slot.state], kinds
        )
        payload, *state = tf.nest.flatten(encoded)  # eagerly, a single result is not a list
        payload = tf.ensure_shape(payload, [None])
        updates = [variable.assign(new) for variable, new in zip(slot.state, state)]
        with tf.control_dependencies([payload]):  # a step that fails before this does not count
            updates += [slot.steps_taken.assign_add(1), slot.payload.variable.assign(payload)]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return tf.identity(payload)

    def _probe(self, step, dtype):
        return checked(
            operators.deepreduce_probe,
            rank_of_job(),
            step,
            fingerprint=self.compressor.fingerprint,
            T=dtype,
        )

    # --- decompress ---

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, pending):
        return self.rounds.look_at(pending.slot, self._result(tensor, pending))

    def _result(self, tensor, pending):
        if pending.group is None:
            return tf.cast(tensor, pending.dtype)
        slot, group = pending.slot, pending.group
        if self._group is group:
            self._group = None  # the next gradient that Horovod compresses starts another message
        with tf.device("CPU:0"):
            scale = self._scale(slot, tensor, pending.step)
            if group.exchange is not None:
                total = group.exchange.sum_of(pending.member, scale)
                return tf.ensure_shape(
                    tf.cast(tf.reshape(total, self._shape_of(pending)), pending.dtype), slot.shape
                )
            if group.gathered is None:
                with tf.control_dependencies([scale]):  # which tells that all ranks are there
                    self._gather(group)
            result = self._decode(slot, group, pending, scale)
            return tf.ensure_shape(result, slot.shape)

    def _gather(self, group):
        name = self._name(group.slots[0])
        if any(slot.home is not None for slot in group.slots):
            group.gathered, group.lengths = self.device_path.gather(group, name, self._allgather)
        else:
            group.gathered = self._allgather(
                group.payloads[0] if len(group.payloads) == 1 else tf.concat(group.payloads, 0),
                name,
            )

    def _name(self, slot):
        return collective_name(self.compressor.number, slot.label)

    def _allgather(self, message, name):
        # hvd.elastic.run recognizes a failure of Horovod by the text HorovodAllgather in the error,
        # which comes from the operator's name. Any other error would end training without a
        # message.
        return hvd.allgather(
            message,
            name=f"HorovodAllgather.{name}",
            ignore_name_scope=True,
            process_set=self.process_set,
        )

    def _scale(self, slot, reduced_probe, step):
        return checked(
            operators.deepreduce_scale, reduced_probe, size_of(self.process_set), step, ranks=ranks_of(self.process_set),
            fingerprint=self.compressor.fingerprint, variable=slot.label,
        )  # fmt: skip

    @staticmethod
    def _shape_of(pending):
        return (
            [int(size) for size in pending.shape]
            if isinstance(pending.shape, tf.TensorShape)
            else pending.shape
        )

    def _decode(self, slot, group, pending, scale):
        shape, ranks = self._shape_of(pending), size_of(self.process_set)
        if slot.home is not None:
            return self.device_path.decode(
                slot, group, pending.gradient, pending.member, shape, scale, ranks, self._numbers
            )
        if self.compressor.codec.is_native(NoMemory()):
            return checked(
                operators.deepreduce_decode_sum, group.gathered, scale, tf.cast(shape, tf.int64), ranks, [], [pending.gradient], [slot.seconds.variable.handle], [],
                member=pending.member, members=len(group.payloads), variable=slot.label, T=pending.dtype,
            )  # fmt: skip

        members = len(group.payloads)

        def decode(gathered, factor, ranks):
            messages = wire.split(gathered)
            wire.raise_notices(slot.label, messages)
            if len(messages) != ranks * members:
                raise CorruptPayloadError(
                    f"parameter {slot.label}: expected {members} messages of each of {ranks} ranks, got {len(messages)} in all"
                )
            payloads = [
                gathered[one.start : one.end] for one in messages[pending.member :: members]
            ]
            return neutral.decode_sum_numpy(
                payloads, np.zeros(slot.elements, np.float32), float(factor)
            )

        total = tf.numpy_function(decode, [group.gathered, scale, ranks], tf.float32)
        return tf.cast(tf.reshape(total, shape), pending.dtype)

    # --- slices ---

    def allreduce_slices(self, slices, variable, op):
        """Reduce the tf.IndexedSlices of one of the compressor's variables, as slices."""
        slot = self._slot_of(variable, "allreduce_gradients")
        if slot.dense:
            return hvd.allreduce(
                tf.convert_to_tensor(slices),
                op=op,
                compression=self.bound_to([variable]),
                process_set=self.process_set,
            )
        if not isinstance(self.compressor.communicator, Allgather):
            raise InvalidArgumentError(
                f"parameter {slot.label}: expected Allgather for slices, got {self.compressor.communicator!r}; sparse_as_dense=True works with all"
            )
        if not self.compressor.codec.is_native(self.compressor.memory) or type(
            self.compressor.memory
        ) not in (NoMemory, Residual):
            raise InvalidArgumentError(
                f"parameter {slot.label}: expected a built-in codec and NoMemory or Residual for slices, got {self.compressor.codec!r} and "
                f"{self.compressor.memory!r}; sparse_as_dense=True works with all"
            )
        refuse_xla()
        self._agree()
        if slot.home is not None:
            slot.move_to_host()
        slot.dtype = slices.dtype
        with tf.device("CPU:0"):
            position = [self.compressor.seed, 0, slot.key, rank_of_job()]
            step = slot.steps_taken.read_value()  # before the encoder increments it
            with tf.control_dependencies([step, *self.rounds.begin(slot)]):
                payload = checked(
                    operators.deepreduce_encode_slices, slices.values, tf.cast(slices.indices, tf.int64), self._numbers.at(step),
                    stack(position, tf.int64), [part.handle for part in slot.state], slot.records, rows=slot.shape[0],
                )  # fmt: skip
            name = self._name(slot)
            probe = self._probe(step, reduced_dtype(slices.dtype))
            reduced = hvd.allreduce(
                probe, op=op, name=f"HorovodAllreduce.{name}.probe", process_set=self.process_set
            )
            scale = self._scale(slot, reduced, step)
            with tf.control_dependencies([scale]):  # which tells that all ranks are there
                gathered = self._allgather(payload, name)
            values, indices = checked(
                operators.deepreduce_decode_slices, gathered, scale, size_of(self.process_set), slot.seconds.variable.handle,
                T=slices.dtype, shape=slot.shape, variable=slot.label,
            )  # fmt: skip
            dense_shape = tf.constant(slot.shape.as_list(), tf.int64)
        return self.rounds.look_at(slot, tf.IndexedSlices(values, indices, dense_shape=dense_shape))

    # --- end of a round, and elastic training ---

    def close_round(self):
        """Undo void steps, before anything reads or changes state after a step."""
        self.rounds.settle(self.slots.values())

    def abandon(self):
        """Discard a step that cannot finish, and everything known about the other ranks.

        The set of ranks may have changed.
        """
        self._group = None
        handshake.forget(self)
        self.rounds.forget(self.slots.values())
        self.transport.reset()
        self.compressor.communicator.reset()

    def _expect_keeper(self):
        """Raise InvalidArgumentError in elastic training without a MemoryKeeper.

        In a graph the check runs with the graph, because the elastic state may be created after
        tracing.
        """
        if not is_elastic() or self.elastic is not None:
            return
        if tf.executing_eagerly():
            expect_keeper(self.elastic, notification_manager)
        elif tf.compat.v1.get_default_graph() not in self._expecting:
            self._expecting.add(tf.compat.v1.get_default_graph())
            tf.numpy_function(lambda: expect_keeper(self.elastic, notification_manager), [], [])

    # --- the handshake ---

    def _agree(self):
        """Compare configurations with the other ranks, once, when the first graph is traced.

        All ranks trace it. There is no handshake here in elastic training, where ``sync`` makes it
        on all ranks at once, nor in a tf.compat.v1 graph, which runs nothing while it is built.
        """
        wire.expect_process_set(self.process_set, reducing_process_set())
        if (
            not self.agreed
            and not is_elastic()
            and tf.compat.v1.executing_eagerly_outside_functions()
        ):
            with tf.init_scope(), tf.device("CPU:0"):
                handshake.agree(self)

    def describe(self, with_steps):
        """Return the settings that must be equal on all ranks, for the handshake."""
        return [
            *self.compressor.settings(self.transport),
            *checkpoint.steps_to_compare(self.slots, with_steps),
        ]
