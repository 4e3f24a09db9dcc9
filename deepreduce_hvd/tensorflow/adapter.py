"""The TensorFlow adapter of a Compressor: what Horovod calls for each gradient.

Horovod calls compress and decompress eagerly, or while a graph is traced. In a graph they build
operators. The state is in tf.Variables, which the operators update in place when the graph runs.
"""

import zlib

import tensorflow as tf

from deepreduce_hvd.adapters.base_adapter import BaseAdapter
from deepreduce_hvd.adapters.embedding_tables import names_of
from deepreduce_hvd.communicators import Allgather, wire
from deepreduce_hvd.coordination.launchers import is_elastic
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.tensorflow.agreement import Agreement
from deepreduce_hvd.tensorflow.auto_schedule import AutoSchedule, lasting_layout
from deepreduce_hvd.tensorflow.checkpoint_view import CheckpointView
from deepreduce_hvd.tensorflow.closed import ClosedTensorFlowAdapter
from deepreduce_hvd.tensorflow.codec_numbers import CodecNumbers
from deepreduce_hvd.tensorflow.collectives import Collectives
from deepreduce_hvd.tensorflow.device import DevicePath
from deepreduce_hvd.tensorflow.embedding_tables import EmbeddingTables
from deepreduce_hvd.tensorflow.exchange import GroupExchange, HorovodTransport
from deepreduce_hvd.tensorflow.graph import is_exported, refuse_xla
from deepreduce_hvd.tensorflow.groups import GradientGroup, Pending
from deepreduce_hvd.tensorflow.host import HostPath
from deepreduce_hvd.tensorflow.ops import DTYPES, listed
from deepreduce_hvd.tensorflow.optimizers_in_use import OptimizersInUse
from deepreduce_hvd.tensorflow.prepare import note_reduction
from deepreduce_hvd.tensorflow.slices import reduce_gradient
from deepreduce_hvd.tensorflow.slot import Slot, reduced_dtype, sent_dtype
from deepreduce_hvd.tensorflow.starting_values import StartingValues
from deepreduce_hvd.tensorflow.unprepared import momentum_warning
from deepreduce_hvd.tensorflow.variables import (
    Variables,
    View,
    begins_call,
    current_reduction,
    expect_variable,
    reduces_several,
    reducing_process_set,
)
from deepreduce_hvd.tensorflow.void_steps import VoidSteps
from deepreduce_hvd.tensorflow.waits import watch
from deepreduce_hvd.tensorflow.ways import Choice, Undecided
from deepreduce_hvd.user_warnings import warn
from deepreduce_hvd.validation import expect_size

#: number of variables whose step counters the watch on waits reads
_STEPS_READ = 3


class Adapter(BaseAdapter):
    """The TensorFlow side of one Compressor.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        named: list of its (name, variable) pairs.

    Attributes:
        auto: the :class:`~deepreduce_hvd.tensorflow.auto_schedule.AutoSchedule` with
            ``schedule="auto"``, otherwise None.
    """

    def __init__(self, compressor, named):
        if compressor.writer is not None:
            raise InvalidArgumentError(
                "Compressor writer: expected None on TensorFlow, got a writer; write scalars of"
                " stats() with tf.summary"
            )
        super().__init__(compressor, HorovodTransport(compressor.process_set))
        self.warn_of_horovod()
        self.warn_of_plan()
        self._planned = None
        if isinstance(compressor.schedule, Plan):  # Horovod decides on messages (message_groups)
            self._planned = lasting_layout(compressor)
            compressor.policies = self._planned.policies
        self.device_path = DevicePath(compressor)
        self.host_path = HostPath(compressor)
        self.collectives = Collectives(compressor, self.process_set)
        self.void_steps = VoidSteps(compressor.loss_scale)
        self._tables = EmbeddingTables(compressor)
        with tf.init_scope(), tf.device("CPU:0"):
            self.slots = {name: self._make_slot(name, parameter) for name, parameter in named}
            # policy -> its CodecNumbers
            self.numbers = {
                policy: CodecNumbers(policy.codec, policy.memory)
                for policy in set(compressor.policies.values())
                if policy.codec is not None and policy.codec.is_native(policy.memory)
            }
            self.variables = Variables()
            for name, parameter in named:
                self.variables.add(parameter, self.slots[name])
            self.auto = AutoSchedule(self) if compressor.schedule == "auto" else None
        self._views = {}  # slots -> their View
        self._groups = {}  # messages to which gradients are added: policy, or None -> GradientGroup
        self.momentum_warned = False
        self._agreement = Agreement(self)
        self.starting_values = StartingValues(self)
        self.optimizers = OptimizersInUse(self)
        self.watcher = watch(self)

    make_closed = ClosedTensorFlowAdapter

    def names_by_id(self):
        return self.variables.names_by_id() if self.slots else {}

    def progress(self):
        """Return the number of steps that this compressor has begun.

        Return 0 in a tf.compat.v1 graph, where the counters cannot be read.
        """
        if not self._agreement.eager:
            return 0
        policies = self.compressor.policies
        compressed = [slot for name, slot in self.slots.items() if not policies[name].dense]
        return max((slot.steps for slot in compressed[:_STEPS_READ]), default=0)

    def _make_slot(self, name, parameter):
        dtype = tf.as_dtype(parameter.dtype).base_dtype
        # variables of integers and others without gradients are never exchanged
        differentiable = dtype.is_floating or dtype.is_complex
        if differentiable and dtype not in DTYPES and getattr(parameter, "trainable", True):
            raise InvalidArgumentError(
                f"Compressor parameter {name}: expected gradients of"
                f" {', '.join(kind.name for kind in DTYPES)}, got {dtype.name}"
            )
        expect_size(name, tf.TensorShape(parameter.shape).num_elements(), "variable")
        slot = Slot(
            name, parameter, zlib.crc32(name.encode()), self.compressor.policies[name],
            self.device_path.home(parameter), self.device_path.nccl, self.void_steps.active,
        )  # fmt: skip
        if self.compressor.schedule == "auto" and not slot.dense:
            slot.choice = Choice(slot)
        slot.table = self._tables.state_of(slot)
        return slot

    # --- plans ---

    @property
    def plan(self):  # type: ignore[override]  # with "auto" it changes
        """The plan of the next step, or None."""
        return self.compressor.schedule if self.auto is None else self.auto.scheduler.layout.plan

    def profile(self):
        """Return the profile of this rank, as :meth:`Compressor.profile`."""
        return self._expect_auto("profile").profile()

    def timeline(self, path):
        """Write the last step as a trace, as :meth:`Compressor.timeline`."""
        self._expect_auto("timeline").write_timeline(path)

    def notes(self):
        planned = self._planned if self.auto is None else self.auto.scheduler
        found = [] if planned is None else planned.notes(names_of(self.slots))
        return [*super().notes(), *found]

    def _expect_auto(self, what):
        if self.auto is None:
            raise InvalidArgumentError(
                f"{what}: expected schedule='auto' on TensorFlow, where only such a compressor"
                " measures its steps, got another schedule"
            )
        return self.auto

    # --- checkpoints ---

    @property
    def trackable(self):
        """A new view of the state for a checkpoint, as :attr:`Compressor.trackable`."""
        return CheckpointView(self.slots, self.compressor)

    # --- views ---

    def bound_to(self, variables):
        """Return the view of the compressor for gradients of these variables only.

        The same variables give the same view object, because Horovod caches graphs by compression
        object.
        """
        variables = listed(variables, "bound_to", "variable")
        slots = tuple(self.slot_of(variable, "bound_to") for variable in variables)
        if not slots:
            raise InvalidArgumentError("bound_to: expected at least one variable, got none")
        return self._views.setdefault(slots, View(self.compressor, slots))

    def slot_of(self, variable, caller):
        slot = self.variables.slot_of(variable)
        if slot is None:
            raise InvalidArgumentError(
                f"{caller}: expected variables that the compressor was given, got"
                f" {getattr(variable, 'name', variable)}"
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
                f"compress: expected a gradient of {', '.join(dtype.name for dtype in DTYPES)}, got"
                f" {tensor.dtype.name}"
            )
        if is_exported():  # nobody trains with such a graph, whose variables are placeholders
            return tensor, None
        refuse_xla()
        agreed = self.require_agreement()
        slot, variable = self.variables.find(
            tensor, tuple(self.slots.values()) if slots is None else slots
        )
        slot.dtype = tensor.dtype
        self._tables.begin(slot, tensor)
        with tf.control_dependencies(agreed):
            # the identity makes the gradient wait; the later cast of a dense one may be a no-op
            gradient = tf.identity(tensor) if agreed else tensor
            return self._begin(slot, gradient, variable)

    def _begin(self, slot, tensor, variable):
        """Build what Horovod reduces for a gradient: the gradient itself, or a probe."""
        if tf.executing_eagerly() and begins_call(tensor):
            self._groups = {}  # what is in them is of calls that failed
        if variable is not None and not self._is_like_all_of_its_shape(slot):
            tensor = expect_variable(tensor, slot, variable)
        last_scale = slot.scale_to_compare()  # before ``begin`` sets the next one
        begun = self.void_steps.begin(slot, tensor, last_scale)
        self.note_reduction(slot, current_reduction(self.transport.size))
        if slot.dense and slot.choice is None:
            if slot.policy.way == FP16 and reduces_several():
                raise InvalidArgumentError(
                    f"parameter {slot.label}: expected a group of its own for 'fp16', because"
                    " Horovod's grouped allreduce takes tensors of one dtype on TensorFlow, got one"
                    " of several gradients; use 'dense' for it, or list the groups without it"
                )
            with tf.control_dependencies(begun):
                reduced = tf.cast(tensor, sent_dtype(tensor.dtype, slot.policy.way))
                return reduced, Pending(slot, tensor, None, 0)
        self._tables.look_at(slot, tensor)
        self._warn_of_momentum()
        with tf.device("CPU:0"):
            step = slot.steps_taken.read_value()  # before a way or an encoder increments it
            begun = [*begun, *self.optimizers.look_for(slot)]
        if self.auto is not None and slot.choice is not None:
            return self.auto.begin(slot, tensor, begun, step, last_scale)
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        # only Allgather sends payloads of several codecs in one message
        in_graph = isinstance(self.compressor.communicator, Allgather)
        kind = None if in_graph else slot.policy
        group = self._groups.get(kind)
        if group is None or group.graph is not graph or slot in group.slots:
            group = GradientGroup(graph, None if in_graph else GroupExchange(self))
            self._groups[kind] = group
        group.slots.append(slot)
        with tf.device("CPU:0"):
            probe = self.collectives.probe(step, last_scale, reduced_dtype(tensor.dtype))
            if slot.table is not None:
                probe = slot.table.with_look(probe, tensor)
            probe = tf.identity(probe, name=f"{self.collectives.name_for(slot)}.probe")
            if group.exchange is not None:
                member = group.exchange.add(slot, tensor, step)
                return probe, Pending(slot, tensor, group, member, step, last_scale)
            with tf.control_dependencies([step, *begun]):
                payload = self._encode(slot, tensor, step)
        group.payloads.append(payload)
        return probe, Pending(slot, tensor, group, len(group.payloads) - 1, step, last_scale)

    def _is_like_all_of_its_shape(self, slot):
        """Return whether gradients of its shape are all sent uncompressed, in the same way.

        A graph that was traced for one of them is then right for all.
        """
        return all(
            one.dense and one.choice is None and one.policy.way == slot.policy.way
            for one in self.slots.values()
            if one.elements == slot.elements and one.shape == slot.shape
        )

    def note_reduction(self, slot, reduction):
        """Note that the gradients of a slot are exchanged; one process alone exchanges nothing.

        Args:
            slot: the slot.
            reduction: one of :data:`~deepreduce_hvd.communicators.wire.REDUCTIONS`.
        """
        slot.reduction = reduction or slot.reduction
        if self.transport.size > 1 or is_elastic():
            slot.reduced = True
            note_reduction(slot)

    def sends_nothing(self, slot):
        return self.transport.size == 1 and not slot.reduced and not is_elastic()

    def _warn_of_momentum(self):
        """Warn once of an optimizer that was not prepared; optimizers reduce in graphs only."""
        if self.momentum_warned or tf.executing_eagerly():
            return
        if (message := momentum_warning(self.compressor)) is not None:
            self.momentum_warned = True
            warn(message)

    def _encode(self, slot, tensor, step):
        numbers = self.numbers.get(slot.policy)
        if slot.home is not None:
            return self.device_path.encode(slot, tensor, numbers)
        return self.host_path.encode(slot, tensor, numbers, step)

    # --- decompress ---

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, pending):
        """Return the reduced gradient, as :meth:`Compressor.decompress`."""
        if pending is None:
            return tensor
        undecided = isinstance(pending, Undecided)
        result = pending.result(tensor) if undecided else self._result(tensor, pending)
        return self.void_steps.look_at(pending.slot, result)

    def _result(self, tensor, pending):
        if pending.group is None:
            return tf.cast(tensor, pending.dtype)
        slot, group = pending.slot, pending.group
        # the next gradient that Horovod compresses starts another message
        self._groups = {kind: one for kind, one in self._groups.items() if one is not group}
        with tf.device("CPU:0"):
            scale = self.collectives.scale_of(
                slot, tensor[: wire.PROBE_NUMBERS], pending.step, pending.last_scale
            )
            if slot.table is not None:
                slot.table.decide(tensor[wire.PROBE_NUMBERS :], scale)
            compared = self.starting_values.compare_again(slot, pending.step, scale)
            if group.exchange is not None:
                with tf.control_dependencies(compared):
                    total = tf.identity(group.exchange.sum_of(pending.member, scale))
                return tf.ensure_shape(
                    tf.cast(tf.reshape(total, pending.shape), pending.dtype), slot.shape
                )
            if group.gathered is None:
                with tf.control_dependencies([scale]):  # then all ranks take part
                    self._gather(group)
            with tf.control_dependencies(compared):
                result = self._decode(slot, group, pending, scale)
            return tf.ensure_shape(result, slot.shape)

    def _gather(self, group):
        name = self.collectives.name_for(group.slots[0])
        if any(slot.home is not None for slot in group.slots):
            group.gathered, group.lengths = self.device_path.gather(group, name, self.collectives)
        else:
            group.gathered = self.collectives.gather_messages(group.message, name)

    def _decode(self, slot, group, pending, scale):
        arguments = (
            slot, group, pending.gradient, pending.member, pending.shape, scale,
            self.collectives.size,
        )  # fmt: skip
        if slot.home is not None:
            return self.device_path.decode(*arguments, self.numbers[slot.policy])
        return self.host_path.decode(*arguments)

    def allreduce(self, gradient, variable, op):
        """Return the reduced gradient of a variable, see :func:`allreduce_gradients`."""
        return reduce_gradient(self, gradient, variable, op)

    # --- end of a step, and elastic training ---

    def close_steps(self):
        """Restore the memories of void steps, before anything else reads or changes state."""
        self.void_steps.settle(self.slots.values())

    def forget_steps(self):
        """Discard the steps in progress."""
        self._groups = {}
        self.void_steps.forget(self.slots.values())
        if self.auto is not None:
            self.auto.restart()

    # --- the handshake ---

    def describe(self, with_steps):
        """Return the settings that ranks compare.

        A graph of tf.compat.v1 has no values here. The probes compare its step counters.
        """
        with_values = with_steps and self._agreement.eager
        values = self.starting_values.settings() if with_values else []
        return [*super().describe(with_values), *values]

    def require_agreement(self):
        """Compare process sets and configurations; return tensors to compute before all else."""
        wire.expect_process_set(self.process_set, reducing_process_set())
        return self._agreement.require()
