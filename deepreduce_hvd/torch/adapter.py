"""The PyTorch adapter of a Compressor: what Horovod calls for each gradient."""

import time

import horovod.torch as hvd
import torch
from horovod.common.elastic import notification_manager

from deepreduce_hvd.adapters.earlier_compressors import note_first_use
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.bucket import BucketMember
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.elastic import expect_keeper
from deepreduce_hvd.coordination.roll_call import REPEATED, RollCall
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch import results, unnamed
from deepreduce_hvd.torch.base_adapter import TorchAdapter
from deepreduce_hvd.torch.caller import DIRECT, current_caller
from deepreduce_hvd.torch.cuda.device import DevicePath
from deepreduce_hvd.torch.elastic import register as register_elastic
from deepreduce_hvd.torch.exchanges import Exchanges
from deepreduce_hvd.torch.host import HostPath
from deepreduce_hvd.torch.optimizer_steps import OptimizerSteps
from deepreduce_hvd.torch.parameters import Parameters, frozen_parameters, make_slots, values_of
from deepreduce_hvd.torch.pending import Pending, as_reduced, changed_warning, reduced_dtype
from deepreduce_hvd.torch.references import Kept, Probes
from deepreduce_hvd.torch.transport import HorovodTransport
from deepreduce_hvd.torch.unattached import unregistered
from deepreduce_hvd.torch.unexchanged import Unexchanged
from deepreduce_hvd.torch.unprepared import momentum_warning
from deepreduce_hvd.torch.waits import called_by_horovod, watch

_HOST = torch.device("cpu")


class Adapter(TorchAdapter):
    """The PyTorch side of one Compressor.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        named: list of its (name, parameter) pairs.
    """

    def __init__(self, compressor, named):
        register_elastic(type(compressor))
        unnamed.name_all()
        super().__init__(compressor, HorovodTransport(compressor.process_set))
        self.warn_of_horovod()
        self.device_path = DevicePath(compressor, hvd.nccl_built, hvd.rank)
        self.host_path = HostPath(self.device_path)
        self.slots = make_slots(compressor, named, self.device_path.home)
        self._parameters = Parameters(self.slots)
        self._probes = Probes()
        self._steps = OptimizerSteps(compressor, self._parameters, self.tables, self.layout)
        self.is_in_step = self._steps.any_in_progress
        self._unexchanged = Unexchanged(self._parameters, self.transport, self._steps)
        self._exchanges = Exchanges(compressor, self.device_path, self.times)
        # Ranks that step optimizers in other orders learn of a table one step earlier or later.
        # When a step of the job has ended, all of them know the same ones.
        self._tables_before = []
        # whether a result was returned since the last check for elastic training
        self._delivered = True
        self.watcher = watch(self)
        handshake.register(self)

    def _is_on_gpu(self, name):
        return self.device_path.takes(self.slots[name].parameter)

    def sends_nothing(self, slot):
        # Horovod does not call the compressor of one rank, except in elastic training
        return self.transport.size == 1 and slot.steps == slot.untimed_steps

    def unregistered(self):
        return unregistered() if self.transport.size == 1 else None

    def why_unused(self, slots):
        if self.transport.size == 1 or not self.transport.includes_this_rank:
            return self.unregistered()
        if any(slot.steps != slot.untimed_steps for slot in slots):
            return None
        return "give hvd.DistributedOptimizer compression=compressor"

    def load_state_dict(self, state):
        self._steps.expect_none_in_progress()  # ranks have compared what a state changes
        super().load_state_dict(state)

    # --- compress ---

    def _step_of(self, owner, slot):
        """Return the step of an optimizer that a gradient belongs to; begin one if needed.

        Args:
            owner: the gradient's optimizer, or :data:`~deepreduce_hvd.torch.caller.DIRECT`.
            slot: slot of the gradient's parameter.
        """
        step = self._steps.joined_by(owner, slot)
        if step is not None:
            return step
        if owner is not DIRECT and self._steps.reduces_again(owner):
            raise InvalidArgumentError(
                f"{type(owner).__name__}.step: expected `with optimizer.skip_synchronize():` around"
                " step() after synchronize(), got step() alone, which would reduce the gradients"
                " once more and add the residuals to them"
            )
        if self._delivered:
            expect_keeper(self.elastic, notification_manager)
            if self.elastic is not None:
                self.elastic.follow()
        if not self.agreed and self.elastic is None:  # in elastic training, ``sync`` calls it
            note_first_use(self)
            handshake.agree(self)
        self._delivered = False
        if owner is not DIRECT and owner not in self._with_momentum:
            # what may be an embedding table is known in the next step
            message = momentum_warning(owner, self.compressor, is_exempt=self.tables.is_undecided)
            self.warn_of_momentum(owner, message)
        last = self._steps.last_of(owner)
        if last is not None and last.complete:
            self._close(last)  # the next step may continue it, and be void if it is
        leads = self._steps.leads(owner)
        if leads:
            self.times.begin(time.perf_counter())
            self.layout = self.scheduler.layout
            self._tables_before = super().known_tables()
        sums, ranks = self.device_path.sums(), self.transport.ranks
        return self._steps.begin(owner, sums, self.layout, ranks, leads)

    @called_by_horovod
    def compress(self, tensor):
        """Start the exchange of one gradient, as :meth:`Compressor.compress`."""
        started = time.perf_counter()
        reduced, pending = self._compress(tensor, started)
        name = pending.slot.name
        self.times.gradients((name,), name, started, time.perf_counter())
        return reduced, pending

    def _compress(self, tensor, started):
        caller = current_caller()
        wire.expect_process_set(self.process_set, caller.process_set)
        slot = self._parameters.slot_for(tensor, caller.parameter)
        step = self._step_of(caller.owner, slot)
        slot.settle()
        if slot.last_step is not None:
            self._close(slot.last_step)
        step.add(slot, self.tables.policy_of)
        self._steps.note_exchange(slot, step)
        slot.steps += 1
        if caller.owner is not DIRECT and (slot.dense or len(step.ranks) == 1):
            # without a probe, or with one rank, the factor does not tell it
            slot.reduction = wire.AVERAGE if caller.owner.op == hvd.Average else wire.SUM
        self.look_for_discarded(slot, self._parameters)
        made, slot.made = slot.made, False
        self._unexchanged.exchanged((slot,))
        if slot.dense:
            way = slot.policy.way
            summed = slot.with_memory(
                tensor, made, step.loss_scale, len(step.ranks),
                reduced_dtype(tensor.dtype, way), divides=True,
            )  # fmt: skip
            reduced = as_reduced(summed, way)
            slot.count_dense(tensor, reduced)
            kept = Kept(reduced)
            kept.hold()
            return reduced, Pending(slot, tensor, made, step, kept)
        flight = step.flight_for(slot, self._call_ranks)
        undecided = self.tables.is_undecided(slot)
        member, seen = self._member(slot, tensor, made, flight.copies, step.loss_scale)
        flight.members[slot] = member
        # At the last gradient, wait until all messages in flight are sent, so that they travel
        # while the program does something else. After that, no exchange starts or advances until
        # a result is requested.
        if step.more_to_come:
            self._exchanges.encode_early(flight, slot, member)
            if flight.full:
                self._exchanges.start_early(flight, self.transport)
            self._exchanges.advance(started)
        elif step.owned:
            self._exchanges.wait_until_sent(step.flights, self.transport)
        numbers = wire.probe(hvd.rank(), *step.compared(slot))
        if undecided:  # on all ranks
            numbers = [*numbers, *map(float, seen)]
        kept = self._probes.take(numbers, caller.probe_device(tensor))
        return kept.tensors[0], Pending(slot, tensor, made, step, kept, flight)

    def _call_ranks(self, label):
        """Start a roll call."""
        repeated = 1 if self.elastic is None else REPEATED
        return RollCall(self.transport, collective_name(self.compressor.number, label), repeated)

    def _member(self, slot, tensor, made, copies, loss_scale):
        """Return the bucket member of a gradient, or one that failed, and look for a table."""
        slot.payload = None
        seen = False, False
        try:
            # A gradient of zeros that backward did not make carries no information: the parameter
            # is frozen or was not used. Its member is held: it sends nothing and keeps its memory.
            held = not made and not bool(tensor.any())
            if not held:
                seen = self.look_for_table(slot, tensor)
            on_device = self.device_path.takes(tensor)
            slot.move_to(tensor.device if on_device else _HOST)
            gradient = slot.before_encoding(tensor, made, loss_scale)
            if on_device:
                return self.device_path.member(slot, gradient, held), seen
            return self.host_path.member(slot, gradient, copies, held), seen
        # catch all errors: the other ranks must get a notice instead of waiting
        except Exception as error:
            return BucketMember.failed(slot.name, tensor.numel(), error), seen

    # --- decompress ---

    @called_by_horovod
    def decompress(self, tensor, pending):
        """Return the reduced gradient, as :meth:`Compressor.decompress`.

        Args:
            tensor: the reduced tensor.
            pending: what compress returned; None for a sparse gradient, which Horovod does not pass
                to compress.
        """
        self._delivered = True
        if pending is None:
            return self._pass_on(tensor)
        started = time.perf_counter()
        slot, step, flight = pending.slot, pending.optimizer_step, pending.flight
        if pending.has_changed():
            self._warn_once("changed", changed_warning(slot))
        if not step.delivering:
            step.begin_delivery()
            if self._steps.ended_before(step):
                self._tables_before = super().known_tables()
                self._steps.end_step_of_job(self.scheduler, self.transport, self.slots)
        if flight is None:
            result = self._dense_result(tensor, pending)
        else:
            result = self._exchanged_result(tensor, pending)
        step.hand_over(slot, flight)
        self.times.result(slot.name, started, time.perf_counter())
        if step.complete:
            self.warn_of_tables()
            step.device_sums.send()
            if self._steps.ends_with(step):
                self._steps.end_step_of_job(self.scheduler, self.transport, self.slots)
        return result

    def _pass_on(self, tensor):
        """Return a sparse gradient, which Horovod reduced itself, and count it."""
        self._warn_once(
            "sparse",
            "a sparse gradient was not compressed; give DistributedOptimizer sparse_as_dense=True"
            " to compress it",
        )
        caller = current_caller()
        slot = self._parameters.get(caller.parameter)
        if slot is not None and slot.parameter.grad is not None and slot.parameter.grad.is_sparse:
            slot.count_sparse(slot.parameter.grad)
            self._steps.note_exchange(slot)
        step = self._steps.last_of(caller.owner)
        if step is not None and not step.closed and step.loss_scale is not None:
            self._look_at(step, tensor.coalesce().values())
        return tensor

    def _dense_result(self, tensor, pending):
        """Return the result of a gradient that Horovod reduced uncompressed."""
        pending.kept.release()
        slot, gradient, result = pending.slot, pending.gradient, tensor
        like = results.layout_for(gradient, slot.parameter, pending.made)
        if tensor.dtype != gradient.dtype or tensor.stride() != like.stride():
            result = pending.memory_for_result(tensor).copy_(tensor)
        if pending.may_overflow:
            self._look_at(pending.optimizer_step, tensor, slot.name)
        elif pending.optimizer_step.loss_scale is not None:
            self._look_at(pending.optimizer_step, result)
        return result

    def _exchanged_result(self, tensor, pending):
        """Return the sum of a gradient that was compressed, after its exchange."""
        slot, step, flight = pending.slot, pending.optimizer_step, pending.flight
        # first the probe: in an exchange, ranks with other configurations could wait forever
        try:
            probe = tensor.tolist()
            scale = wire.scale_of(
                slot.name, probe[: wire.PROBE_NUMBERS], step.ranks, *step.compared(slot)
            )
        except InvalidArgumentError:
            flight.roll_call.wait()
            raise
        if len(step.ranks) > 1:
            slot.reduction = wire.reduction_of(scale, len(step.ranks))
        memory = pending.memory_for_result(tensor)
        self._probes.give_back(pending.kept)
        self._exchanges.run(step, self._steps.flights_beside, self.transport)
        exchange = flight.exchange
        total = exchange.finish()
        if len(probe) > wire.PROBE_NUMBERS:
            as_table, as_other = probe[wire.PROBE_NUMBERS :]
            self.tables.decide(slot, as_table != 0, as_other != 0)
            if slot.is_table:
                self.tables.follow(self.slots)
        started = time.perf_counter()
        number = flight.numbers[slot]
        slot.encode_seconds += exchange.encode_seconds(number)
        slot.encoding = None  # it refers to the payload
        slot.count_sent(
            pending.gradient,
            exchange,
            4 * len(probe) + (flight.roll_call.sent_bytes if flight.called_by is slot else 0),
        )
        if total.non_finite(number):
            step.void = True
            self.warn_of_non_finite(slot.name)
        result = self._decode(step, slot, memory, total, number, scale)
        slot.decode_seconds += time.perf_counter() - started
        return result

    def _decode(self, step, slot, memory, total, number, scale):
        """Return the sum of one gradient.

        Args:
            step: the gradient's step.
            slot: slot of its parameter.
            memory: the tensor for a dense sum.
            total: sum of its bucket.
            number: number of its bucket member.
            scale: factor of the sum.
        """
        like = slot.parameter.grad
        if like is not None and like.layout == torch.sparse_coo and not total.non_finite(number):
            result = results.sparse_like(like, *total.sparse(number, scale))
            self._look_at(step, result.values(), slot.name)
            return result
        if self.device_path.takes(memory):
            step.device_sums.decode(memory, total, number, scale, step.owned)
            if step.loss_scale is not None:
                self._look_at(step, memory)
            return memory
        summed, largest = self.host_path.decode(memory, total, number, scale)
        if results.may_exceed(memory.dtype, largest):
            self._look_at(step, summed.to(memory.dtype), slot.name)
        return memory

    def _look_at(self, step, result, name=None):
        """Record whether an optimizer gets NaN or Inf; loss scaling then skips its step.

        Args:
            step: the step of the result.
            result: tensor to check.
            name: name of the parameter for a warning; None for no warning.
        """
        if result.is_cuda:
            step.device_sums.look_at(result)
        elif not results.is_finite(result):
            step.void = True
            if name is not None:
                self.warn_of_non_finite(name)

    # --- end of a step, and state ---

    def known_tables(self):
        return self._tables_before

    def framework_settings(self):
        return [frozen_parameters(self.slots)]

    def describe(self, with_steps):
        if not with_steps:  # an elastic state makes the parameters equal after the handshake
            return super().describe(with_steps)
        parameters = {name: slot.parameter for name, slot in self.slots.items()}
        values = values_of(parameters, self.transport)
        return [*super().describe(with_steps), values]

    def forget_steps(self):
        """Discard the steps in progress."""
        self._exchanges.forget()  # first, because threads read the policies
        for name, slot in self.slots.items():
            slot.last_step = None
            slot.policy = self.compressor.policies[name]
        self.times.forget()
        self.scheduler.restart()
        self.layout = self.scheduler.layout
        self._steps.forget(self.layout)
        self._parameters.discards = None  # an elastic state restores what its gradients left
        self._delivered = True

    def close_steps(self):
        """End all complete steps, before anything reads or changes state between two steps."""
        self._exchanges.settle()
        for step in {slot.last_step for slot in self.slots.values() if slot.last_step is not None}:
            if step.complete:
                self._close(step)

    def _close(self, step):
        """End a step: undo it if it is void, and write scalars."""
        if step.closed:
            return
        step.closed = True
        finite = step.device_sums.check()
        step.void = step.void or not finite
        self._end_step(step.slots, step.void)
