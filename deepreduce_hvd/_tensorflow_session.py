"""The compressor's work on TensorFlow: which variable a gradient belongs to, its state, and the way there and back.

Horovod calls compress and decompress while a graph is traced, or eagerly; what they do then is build operators. The state is in
tf.Variables, which the operators update in place whenever the graph runs.
"""

import os
import re
import weakref
import zlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from deepreduce_hvd import codec as neutral, payload as container, state as saved_state, wire
from deepreduce_hvd._tensorflow_device import DevicePath
from deepreduce_hvd._tensorflow_exchange import GroupExchange, HorovodTransport
from deepreduce_hvd._tensorflow_state import Slot, local_variable, reduced_dtype
from deepreduce_hvd.communicators import Allgather
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.tensorflow import DTYPES, checked, operators


class _Group:
    """The gradients of one message: all that Horovod has compressed before it decompresses the first of them."""

    def __init__(self, graph, exchange):
        self.graph = graph
        self.payloads = []
        self.slots = []
        self.gathered = None
        self.lengths = None  # of the gathered messages, where a GPU decodes some
        self.exchange = exchange  # with any communicator but Allgather
        self.closed = False


class _Pending:
    """One gradient between compress and decompress."""

    def __init__(self, slot, tensor, group, member):
        self.slot = slot
        self.gradient = tensor
        self.dtype = tensor.dtype
        self.shape = tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor, out_type=tf.int64)
        self.group = group
        self.member = member


class Session:
    """The TensorFlow side of one Compressor."""

    def __init__(self, compressor, named):
        if compressor.loss_scale is not None:
            raise InvalidArgument("Compressor loss_scale: expected None on TensorFlow, where residuals do not follow a loss scale, got a function")
        if compressor.writer is not None:
            raise InvalidArgument("Compressor writer: expected None on TensorFlow, got a writer; write scalars of stats() with tf.summary")
        self.compressor = compressor
        self.transport = HorovodTransport(compressor.process_set)
        self.process_set = self.transport.process_set
        self.device_path = DevicePath(compressor)
        with tf.init_scope(), tf.device("CPU:0"):
            #: how many exchanges of communicators other than Allgather there were
            self.exchanges = local_variable(np.int64(0), name="deepreduce_exchanges")
            self.slots = {name: self._make_slot(name, parameter) for name, parameter in named}
            sparsifier_steps = compressor.codec.sparsifier.schedule_steps
            self._codec_table = np.array([compressor.codec.fields(compressor.memory, step) for step in range(sparsifier_steps + 1)])
        #: what tf.train.Checkpoint keeps
        self.trackable = tf.Module()
        self.trackable.slots = self.slots
        self._slot_of = {id(parameter): (parameter, self.slots[name]) for name, parameter in named}
        self._taken = weakref.WeakKeyDictionary()
        self._group = None

    def _make_slot(self, name, parameter):
        shape = tf.TensorShape(getattr(parameter, "shape", None))
        if not shape.is_fully_defined() or not hasattr(parameter, "dtype"):
            raise InvalidArgument(f"Compressor parameter {name}: expected a variable of known shape, got {type(parameter).__name__} of shape {shape}")
        if shape.num_elements() > container.MAX_ELEMENTS:
            raise InvalidArgument(
                f"Compressor parameter {name}: expected at most {container.MAX_ELEMENTS} elements, got {shape.num_elements()}; split the variable"
            )
        home = self.device_path.home(parameter)
        return Slot(name, parameter, zlib.crc32(name.encode()), self.compressor.memory, self.compressor.dense_below, home, self.device_path.nccl)

    # --- which variable ---

    def _slot_for(self, tensor):
        """Horovod names no variable: a step's gradients of equal shape are told apart by their order, which is that of its sources."""
        taken = self._taken.setdefault(_outermost_graph(), set())
        alike = [slot for slot in self.slots.values() if slot.shape == tensor.shape]
        if not alike:
            alike = [slot for slot in self.slots.values() if slot.shape.is_compatible_with(tensor.shape)]
        if not alike:
            raise InvalidArgument(
                f"compress: expected the gradient of one of the {len(self.slots)} named parameters, got a tensor of shape {tensor.shape}; "
                "give Compressor all the variables that Horovod reduces gradients of"
            )
        if len({tuple(slot.shape) for slot in alike}) > 1:
            raise InvalidArgument(
                f"compress: expected a gradient of known shape, got one of shape {tensor.shape}, which could be that of "
                f"{', '.join(slot.label for slot in alike)}; tf.ensure_shape tells it"
            )
        free = [slot for slot in alike if slot.label not in taken]
        if not free:  # the next step in the same graph
            taken.clear()
            free = alike
        taken.add(free[0].label)
        return free[0]

    # --- there ---

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor):
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(f"compress: expected a gradient of {', '.join(dtype.name for dtype in DTYPES)}, got {tensor.dtype.name}")
        _refuse_xla()
        slot = self._slot_for(tensor)
        slot.dtype = tensor.dtype
        if slot.dense:
            return tf.cast(tensor, reduced_dtype(tensor.dtype)), _Pending(slot, tensor, None, 0)
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        group = self._group
        if group is None or group.closed or group.graph is not graph:
            in_graph = isinstance(self.compressor.communicator, Allgather)
            group = self._group = _Group(graph, None if in_graph else GroupExchange(self))
        with tf.device("CPU:0"):
            probe = tf.identity(self._probe(reduced_dtype(tensor.dtype)), name=f"deepreduce_probe_{_operation_name(slot.label)}")
            if group.exchange is not None:
                return probe, _Pending(slot, tensor, group, group.exchange.add(slot, tensor))
            payload = self._encode(slot, tensor)
        group.payloads.append(payload)
        group.slots.append(slot)
        return probe, _Pending(slot, tensor, group, len(group.payloads) - 1)

    def _encode(self, slot, tensor):
        compressor = self.compressor
        position = [compressor.seed, 0, slot.key, _rank()]
        if slot.home is not None:
            return self.device_path.encode(slot, tensor, self._codec_table, lambda step: _stack([position[0], step, *position[2:]], tf.int64))
        if compressor.codec.native:
            handles = [part.handle for part in slot.state]
            return checked(operators.deepreduce_encode, tensor, self._codec_table, _stack(position, tf.int64), handles, slot.records)

        def encode(gradient, steps, rank, *state):
            state = [part.copy() for part in state]
            try:
                payload, _ = neutral.encode_numpy(
                    compressor.codec, compressor.memory, gradient, state, 0.0, compressor.seed, int(steps), slot.key, int(rank),
                    dtype=DTYPES[tensor.dtype],
                )  # fmt: skip
            except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
                payload = wire.notice(error)
            return [payload, *state]

        gradient = tf.reshape(tf.cast(tensor, reduced_dtype(tensor.dtype)), [-1])
        kinds = [tf.uint8, *[tf.float32] * len(slot.state)]
        payload, *state = tf.numpy_function(encode, [gradient, slot.steps_taken, position[3], *slot.state], kinds)
        payload = tf.ensure_shape(payload, [None])
        updates = [variable.assign(new) for variable, new in zip(slot.state, state)]
        updates += [slot.steps_taken.assign_add(1), slot.payload.variable.assign(payload)]
        with tf.control_dependencies([update for update in updates if tf.is_tensor(update)]):
            return tf.identity(payload)

    def _probe(self, dtype):
        one, first_rank, *fingerprint = wire.probe(0, self.compressor.fingerprint)
        rank = _rank()
        return _stack([one, (tf.cast(rank, dtype) if tf.is_tensor(rank) else rank) + first_rank, *fingerprint], dtype)

    # --- and back ---

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, pending):
        if pending.group is None:
            return tf.cast(tensor, pending.dtype)
        slot, group = pending.slot, pending.group
        group.closed = True
        with tf.device("CPU:0"):
            if group.exchange is not None:
                total = group.exchange.sum_of(pending.member, self._scale(slot, tensor))
                return tf.ensure_shape(tf.cast(tf.reshape(total, self._shape_of(pending)), pending.dtype), slot.shape)
            if group.gathered is None:
                self._gather(group)
            result = self._decode(slot, group, pending, self._scale(slot, tensor))
            return tf.ensure_shape(result, slot.shape)

    def _gather(self, group):
        name = f"deepreduce_{_operation_name(group.slots[0].label)}"
        if any(slot.home is not None for slot in group.slots):
            group.gathered, group.lengths = self.device_path.gather(group, name, self._allgather)
        else:
            group.gathered = self._allgather(group.payloads[0] if len(group.payloads) == 1 else tf.concat(group.payloads, 0), name)

    def _allgather(self, message, name):
        return hvd.allgather(message, name=name, ignore_name_scope=True, process_set=self.process_set)

    def _scale(self, slot, reduced_probe):
        return checked(
            operators.deepreduce_scale, reduced_probe, _size(self.process_set), ranks=_ranks(self.process_set),
            fingerprint=self.compressor.fingerprint, variable=slot.label,
        )  # fmt: skip

    @staticmethod
    def _shape_of(pending):
        return [int(size) for size in pending.shape] if isinstance(pending.shape, tf.TensorShape) else pending.shape

    def _decode(self, slot, group, pending, scale):
        shape = self._shape_of(pending)
        if slot.home is not None:
            return self.device_path.decode(slot, group, pending.gradient, pending.member, shape, scale, self._codec_table)
        if self.compressor.codec.native:
            return checked(
                operators.deepreduce_decode_sum, group.gathered, scale, tf.cast(shape, tf.int64), [], [pending.gradient], [slot.seconds.variable.handle], [],
                member=pending.member, members=len(group.payloads), variable=slot.label, T=pending.dtype,
            )  # fmt: skip

        def decode(gathered, factor):
            messages = wire.split(gathered)
            wire.raise_notices(slot.label, messages)
            payloads = [gathered[one.start : one.end] for one in messages[pending.member :: len(group.payloads)]]
            return neutral.decode_sum_numpy(payloads, np.zeros(slot.elements, np.float32), float(factor))

        total = tf.numpy_function(decode, [group.gathered, scale], tf.float32)
        return tf.cast(tf.reshape(total, shape), pending.dtype)

    # --- slices ---

    def allreduce_slices(self, slices, variable, op):
        """The reduction of tf.IndexedSlices of ``variable``, which must be one of the compressor's, without a dense tensor."""
        known, slot = self._slot_of.get(id(variable), (None, None))
        if known is None:
            raise InvalidArgument(f"allreduce_gradients: expected variables that the compressor was given, got {getattr(variable, 'name', variable)}")
        if slot.dense:
            return hvd.allreduce(tf.convert_to_tensor(slices), op=op, compression=self.compressor, process_set=self.process_set)
        if not isinstance(self.compressor.communicator, Allgather):
            raise InvalidArgument(f"parameter {slot.label}: expected Allgather for slices, got {self.compressor.communicator!r}; sparse_as_dense=True works with all")
        if not self.compressor.codec.native or slot.state_names not in ((), ("residual",)) or self.compressor.memory.parameters():
            raise InvalidArgument(
                f"parameter {slot.label}: expected a built-in codec and NoMemory or Residual for slices, got {self.compressor.codec!r} and "
                f"{self.compressor.memory!r}; sparse_as_dense=True works with all"
            )
        _refuse_xla()
        if slot.home is not None:
            slot.move_to_host()
        slot.dtype = slices.dtype
        with tf.device("CPU:0"):
            position = [self.compressor.seed, 0, slot.key, _rank()]
            payload = checked(
                operators.deepreduce_encode_slices, slices.values, tf.cast(slices.indices, tf.int64), self._codec_table, _stack(position, tf.int64),
                [part.handle for part in slot.state], slot.records, rows=slot.shape[0],
            )  # fmt: skip
            name = f"deepreduce_{_operation_name(slot.label)}"
            gathered = self._allgather(payload, name)
            probe = self._probe(reduced_dtype(slices.dtype))
            reduced = hvd.allreduce(probe, op=op, name=f"deepreduce_probe_{_operation_name(slot.label)}", process_set=self.process_set)
            values, indices = checked(
                operators.deepreduce_decode_slices, gathered, self._scale(slot, reduced), slot.seconds.variable.handle,
                T=slices.dtype, shape=slot.shape, variable=slot.label,
            )  # fmt: skip
        return tf.IndexedSlices(values, indices, dense_shape=tf.constant(slot.shape.as_list(), tf.int64))

    # --- what the compressor tells ---

    def stats(self):
        return {name: slot.statistics(self.compressor.memory) for name, slot in self.slots.items()}

    def state_dict(self):
        return saved_state.dump(self.slots, self.compressor.fingerprint, self.process_set.rank(), self.process_set.size())

    def load_state_dict(self, state):
        saved_state.load(self.slots, state, self.compressor.fingerprint, self.process_set.rank(), self.process_set.size())


def _elastic():
    """Whether ranks may change under a traced graph."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def _rank():
    return hvd.rank_op() if _elastic() else hvd.rank()


def _size(process_set):
    return hvd.size_op(process_set.process_set_id) if _elastic() else process_set.size()


def _ranks(process_set):
    """The global ranks of a process set; none stands for all of them."""
    return [] if process_set.ranks is None or process_set.process_set_id == 0 else list(process_set.ranks)


def _stack(parts, dtype):
    """Python numbers, or numbers of the graph among them, as one tensor."""
    if any(tf.is_tensor(part) for part in parts):
        return tf.stack([tf.cast(part, dtype) for part in parts])
    return tf.constant(parts, dtype)


def _operation_name(label):
    return re.sub("[^a-zA-Z0-9_]", "_", label)


def _outermost_graph():
    """The graph of the whole step: Horovod traces each reduction in a branch of its own. An object that lives while the graph does."""
    if tf.executing_eagerly():
        return tf.Module  # any one object: eager steps follow each other
    graph = tf.compat.v1.get_default_graph()
    in_function = tf.compat.v1.executing_eagerly_outside_functions()
    while graph.building_function and (graph.outer_graph.building_function or not in_function):
        graph = graph.outer_graph
    return graph


def _refuse_xla():
    from tensorflow.python.ops import control_flow_util

    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidArgument("compress: expected a function without XLA, got one with jit_compile=True; payload sizes are not known when XLA compiles")
