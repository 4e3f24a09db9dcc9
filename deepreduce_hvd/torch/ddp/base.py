"""What the adapters over torch.distributed share: steps whose exchanges a thread runs."""

import functools
import os
import time
import weakref

import torch.distributed as dist

from deepreduce_hvd.adapters import embedding_tables
from deepreduce_hvd.adapters.backward_pass import BackwardPass
from deepreduce_hvd.adapters.earlier_compressors import earlier_than, note_first_use
from deepreduce_hvd.communicators.bucket import label_of
from deepreduce_hvd.communicators.driver import Driver
from deepreduce_hvd.communicators.encoding_threads import EncodingThreads
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.collective_names import take_number
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.accumulation import Accumulation, any_needs_new_gradients
from deepreduce_hvd.torch.base_adapter import TorchAdapter
from deepreduce_hvd.torch.ddp.buckets import Way
from deepreduce_hvd.torch.ddp.failures import watch
from deepreduce_hvd.torch.ddp.mirrors import MirroredJob
from deepreduce_hvd.torch.ddp.void_steps import VoidSteps
from deepreduce_hvd.torch.host import HostPath
from deepreduce_hvd.torch.slot import Slot
from deepreduce_hvd.torch.step_listener import StepListener
from deepreduce_hvd.torch.unprepared import bypass_warning, momentum_warning
from deepreduce_hvd.validation import expect_loss_scale

#: separates numbers of compressors here from those under Horovod; never a rank
_TORCH_DISTRIBUTED = -1
#: maximum time in seconds to wait for exchanges of a step that is discarded: a rank may be gone
_FORGET_SECONDS = 2.0


class DistributedAdapter(TorchAdapter, StepListener):
    """The side of one Compressor over torch.distributed.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        transport: transport over the ranks whose gradients are averaged. All these ranks create
            the adapter together.
        slots: name of a parameter -> its :class:`~deepreduce_hvd.torch.slot.Slot`.
        on_host: whether the gradients of GPUs are encoded and summed on the host.
        hooks: as for :class:`~deepreduce_hvd.torch.accumulation.Accumulation`.

    Attributes:
        layout: how each gradient is sent. PyTorch decides which gradients share a message.
        ways: name of a parameter -> the :class:`~deepreduce_hvd.torch.ddp.buckets.Way` of its
            gradients, if they are compressed.
        times: as in :class:`~deepreduce_hvd.torch.base_adapter.TorchAdapter`. A gradient counts as
            ready when PyTorch hands over its buffer.
        void_steps: the :class:`~deepreduce_hvd.torch.ddp.void_steps.VoidSteps` of a compressor with
            loss scaling, or None.
        accumulation: the :class:`~deepreduce_hvd.torch.accumulation.Accumulation` of gradients that
            PyTorch averages in ``.grad``, if loss scaling or a memory needs it, or None.
        alone: whether there is one rank, so that nothing is compressed.
        compresses_alone: whether one rank compresses all the same. scripts/gpu_ddp.py sets it, to
            check NCCL with the one rank that a GPU allows.
        may_leave_unused: whether buffers may have old gradients of parameters that a backward pass
            does not use; equal on all ranks.
    """

    may_leave_unused = False
    compresses_alone = False

    def __init__(self, compressor, transport, slots, on_host=True, hooks=False):
        self._pass: BackwardPass | None = None
        super().__init__(compressor, transport, self._buckets_of_pass, on_host)
        self.slots = slots
        self._seen = {}  # name -> what look_for_table returned in this pass
        self.ways = {}
        self.alone = transport.size == 1 and not self.compresses_alone
        self.void_steps = (
            None if compressor.loss_scale is None else VoidSteps(slots.values(), hooks)
        )
        self.accumulation: Accumulation | None = self.void_steps
        if self.void_steps is None and hooks and any_needs_new_gradients(slots.values()):
            self.accumulation = Accumulation(slots.values(), hooks)
        self.host_path = HostPath(None)
        self._follow()
        self._driver = Driver(self.transport)
        #: thread that encodes the gradients of GPUs; its jobs never fail
        self._copier: Driver | None = None
        self.threads = EncodingThreads(compressor.threads, _ranks_on_this_host())
        weakref.finalize(self, self._driver.stop)
        if any(slot.parameter.device.type != "cpu" for slot in slots.values()):
            self._copier = Driver(self.transport)
            weakref.finalize(self, self._copier.stop)
        #: ids of parameters whose gradients are delayed
        self._delayed = {
            id(slot.parameter) for name, slot in slots.items() if compressor.policies[name].delays
        }
        # optimizer -> ids of those of its parameters that were checked for momentum
        self._checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Models that share parameters may have a compressor each. They are registered before the
        # first step, so only residuals that are there before do not count as lost.
        self._earlier = earlier_than(self)
        self._has_stepped = True  # whether an optimizer has stepped since the last backward pass
        self.is_in_step = self._waits_for_step
        StepListener.__init__(self)
        handshake.register(self)
        watch(self)

    def attach(self):
        """Make this the adapter of the compressor; raise an error if ranks differ."""
        compressor, old = self.compressor, self.compressor.adapter
        agreed = getattr(old, "agreed", False)
        old.agreed = True  # no handshake of Horovod for this compressor
        # compressors of other groups, which some ranks do not have, do not count
        compressor.number = take_number((_TORCH_DISTRIBUTED, *self.transport.ranks))
        compressor.adapter = self
        try:
            self.agree()
            compressor.communicator.prepare(self.transport)
        except BaseException:
            compressor.adapter, old.agreed = old, agreed  # the user may try again
            raise

    def agree(self):
        """Compare the settings of all ranks."""
        handshake.agree(self)

    def agree_on_tables(self):
        """Decide with the other ranks, at the end of a backward pass, which parameters are tables.

        No optimizer has stepped yet.
        """
        undecided = [
            slot
            for slot in self.slots.values()
            if self.tables.is_undecided(slot)
            and not (slot.frozen or slot.dense)
            and slot.shape.numel()
        ]
        if not self.alone:
            embedding_tables.agree(self.tables, undecided, self._seen, self.transport)
        self._seen = {}
        if any(slot.is_table for slot in undecided):
            self.tables.follow(self.slots)
        self.warn_of_tables()

    def _follow(self):
        """Send the gradients of the steps from now on as the scheduler and the tables say."""
        layout = self.tables.layout_of(self.scheduler.layout, self.slots.values())
        if layout is self.layout and self.ways:
            return
        self.layout = layout
        known: dict[tuple, Way] = {}
        for name, slot in self.slots.items():
            slot.policy = layout.policies[name]
            way = slot.policy, layout.communicators.get(name, self.compressor.communicator)
            self.ways[name] = known.setdefault(way, Way(*way))

    def compress(self, tensor):
        self._refuse_horovod("compress")

    def decompress(self, tensor, context):
        self._refuse_horovod("decompress")

    @staticmethod
    def _refuse_horovod(what):
        raise InvalidArgumentError(
            f"{what}: expected a compressor of Horovod, got one that is registered with a model of "
            "torch.distributed; create another one for hvd.DistributedOptimizer"
        )

    def _buckets_of_pass(self):
        """Return the names of the parameters in each bucket of the last backward pass, if any."""
        return None if self._pass is None else self._pass.buckets

    def _begin(self, task=None, has_batch=True):
        """End the last step, begin that of a backward pass, and return the pass.

        An error is raised by the first job of the pass, so that the other ranks get it too.

        Args:
            task: as for :class:`~deepreduce_hvd.adapters.backward_pass.BackwardPass`.
            has_batch: whether this rank has a backward pass. A rank without batches, in ``join()``,
                has none, and its optimizer does not step.
        """
        backward_pass = BackwardPass(task)
        self._has_stepped = self._has_stepped and not has_batch
        try:
            last = self._wait_for_results()
            if not self.alone:
                note_first_use(self, self._earlier)
            self._follow()
            if self.void_steps is not None:
                backward_pass.loss_scale = expect_loss_scale(float(self.compressor.loss_scale()))
                self.void_steps.begin(backward_pass.loss_scale)
            self._end_pass(last)
        except Exception as error:
            backward_pass.failure = error
        self._pass = backward_pass
        return backward_pass

    def _start(self, backward_pass, job, slots_and_gradients):
        """Encode the gradients of a job and have the driver run it.

        An error of this rank is sent to the other ranks instead of the exchange.

        Args:
            backward_pass: the :class:`~deepreduce_hvd.adapters.backward_pass.BackwardPass` of the
                job.
            job: the :class:`~deepreduce_hvd.torch.ddp.buckets.BucketJob`.
            slots_and_gradients: function that returns the slots and the gradients.
        """
        started = time.perf_counter()
        backward_pass.jobs.append(job)
        try:
            if backward_pass.failure is not None:
                raise backward_pass.failure
            slots, gradients = slots_and_gradients()
            for slot, gradient in zip(slots, () if self.alone else gradients):
                self._seen[slot.name] = self.look_for_table(slot, gradient)
        except Exception as error:
            job.failure = error
            slots, gradients = [], []
        encode = functools.partial(self._encode, backward_pass, job, slots, gradients, started)
        if self._copier is not None:
            self._copier.put(MirroredJob(job, encode, self._driver))
            return
        if job.failure is None:
            encode()
        self._driver.put(job)

    def _encode(self, backward_pass, job, slots, gradients, started):
        """Encode the gradients of a job, which came at the time ``started``."""
        try:
            if slots and not backward_pass.buckets:
                self.times.begin(started)
            job.encode(slots, gradients)
            if slots:
                names = [slot.name for slot in slots]
                backward_pass.buckets.append(names)
                self.times.gradients(names, label_of(names), started, time.perf_counter())
        except Exception as error:
            job.failure = error

    def close_steps(self):
        last = self._wait_for_results()
        if self.void_steps is not None:
            self.void_steps.show_skipped()
        self._end_pass(last)

    def _wait_for_results(self):
        """Wait for all results of the last backward pass and return it; None if it has ended."""
        self.threads.settle()
        backward_pass, self._pass = self._pass, None
        if backward_pass is not None:
            for job in backward_pass.jobs:
                job.ended.wait()
            self._join_streams()
            backward_pass.note_void()
        return backward_pass

    def _end_pass(self, backward_pass):
        """Write scalars at the end of a backward pass, unless it is None."""
        if backward_pass is not None:
            self._end_step(backward_pass.slots, void=False)

    def _join_streams(self):
        """Let the current streams wait for the work that reads or changes memories on GPUs."""

    def forget_steps(self):
        """Discard the step in progress."""
        self.threads.settle()
        backward_pass, self._pass = self._pass, None
        if backward_pass is not None:  # its jobs read and write the memories
            backward_pass.settle(_FORGET_SECONDS)
        self._join_streams()
        if self.void_steps is not None:
            self.void_steps.forget()
        self.times.forget()
        self.scheduler.restart()
        self._follow()

    def sends_nothing(self, slot):
        return self.alone

    def encodes_sums_of(self, slot):
        """Return whether gradients of a parameter become parts of sums that are encoded again."""
        return slot.name in self.ways and not self.ways[slot.name].communicator.sends_payloads

    def close(self):
        super().close()
        self._delayed = set()
        if self._copier is not None:
            self._copier.stop()
        self._driver.stop()
        self.transport.close()

    def _waits_for_step(self):
        """Return whether gradients of the last backward pass wait for their optimizer.

        Programs that update parameters without an optimizer are not known to wait. With loss
        scaling, an optimizer may skip the step, which undoes what was sent.
        """
        if self._has_stepped or self.alone or self.compressor.loss_scale is not None:
            return False
        slots = self.slots.values()
        return bool(self._checked) and any(slot.parameter.grad is not None for slot in slots)

    def end_step(self, optimizer):
        """Note that an optimizer has stepped; a closure may have made a backward pass in it."""
        self._has_stepped = self._has_stepped or optimizer in self._checked
        if optimizer in self._checked:
            self.warn_of_momentum(optimizer, bypass_warning(optimizer))

    def begin_step(self, optimizer):
        """Warn once if an optimizer steps compressed parameters with momentum.

        Args:
            optimizer: an optimizer that is about to step. Those of its parameters that are
                trained count as checked then, unless it is not known yet whether they are
                embedding tables.
        """
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        owned = [one for one in parameters if id(one) in self._delayed]
        if not owned or self.alone:
            return
        checked = self._checked.setdefault(optimizer, set())
        left = {id(one) for one in owned if one.requires_grad} - checked
        if left:
            undecided = filter(self.tables.is_undecided, self.slots.values())
            left -= {id(slot.parameter) for slot in undecided}
        checked |= left
        if left:
            when = "before you create a learning rate scheduler"
            message = momentum_warning(optimizer, self.compressor, when, self.tables.is_undecided)
            self.warn_of_momentum(optimizer, message)


def expect_unused(compressor):
    """Raise InvalidArgumentError unless a compressor can be registered with a model."""
    adapter = compressor.adapter
    if isinstance(adapter, DistributedAdapter):
        raise InvalidArgumentError(
            "register: expected a compressor without a model, got one that is registered with a "
            "model already; create one compressor per model"
        )
    if compressor.process_set is not None:
        raise InvalidArgumentError(
            "register: expected no process_set, which belongs to Horovod; give the model a process "
            "group or a mesh"
        )
    if any(not isinstance(slot, Slot) for slot in adapter.slots.values()):
        raise InvalidArgumentError(
            "register: expected a compressor of PyTorch parameters, got one of "
            f"{type(next(iter(adapter.slots.values()))).__module__}"
        )
    if getattr(adapter, "agreed", False):
        raise InvalidArgumentError(
            "register: expected a compressor that nothing uses, got one that Horovod has used;"
            " create another one"
        )


def _ranks_on_this_host():
    """Return the number that torchrun gives; without it, that of all ranks."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else dist.get_world_size()
