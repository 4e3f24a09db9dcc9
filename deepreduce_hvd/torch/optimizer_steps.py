"""Steps of optimizers, each from its first gradient to its last result."""

import weakref

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning.layout_changes import LayoutChanges
from deepreduce_hvd.torch.accumulation import Accumulation, any_needs_new_gradients
from deepreduce_hvd.torch.caller import DIRECT, is_step_after_synchronize
from deepreduce_hvd.torch.optimizer_buckets import Flight, OptimizerBuckets, SeparateBuckets
from deepreduce_hvd.torch.unknown_scale import expect_synchronized
from deepreduce_hvd.validation import expect_loss_scale

_TWICE = (
    "parameter {}: expected one hvd.DistributedOptimizer to exchange its gradient, got two; if you"
    " have replaced an optimizer, before you create the new one delete the old one and the last"
    " loss, whose graph refers to it, and call gc.collect()"
)


class OptimizerStep:
    """State of one step of one optimizer.

    Direct calls of ``hvd.allreduce`` between two backward passes form such a step, too.

    Attributes:
        buckets: the :class:`OptimizerBuckets` or :class:`SeparateBuckets` of the gradients.
        layout: the :class:`~deepreduce_hvd.planning.layout.Layout` of the step.
        ranks: list of the global ranks that take part. They do not change within a step.
        loss_scale: loss scale of this step, or None.
        continues: whether its gradients are added to those of the optimizer's last step, because
            one step of the user's program synchronizes several times.
        slots: slots whose gradients have come.
        delivering: whether a result has been requested; all gradients have come before that.
        void: whether some result has NaN or Inf.
        closed: whether the end of the step has been settled.
        leads: whether a step of the job begins with this one, see :meth:`OptimizerSteps.leads`.
        has_all: whether its optimizer has all parameters that are trained.
        exchanged: whether all exchanges of its gradients so far are done.
    """

    def __init__(self, buckets, layout, ranks, loss_scale, device_sums, gradients_made, leads):
        self.buckets = buckets
        self.layout = layout
        self.ranks = ranks
        self.loss_scale = loss_scale
        self.device_sums = device_sums
        self.continues = False
        self.slots = []
        self.delivering = False
        self.void = False
        self.closed = False
        self.leads = leads
        self.has_all = False
        self.exchanged = False
        self._flights = {}  # number of a bucket -> Flight
        self._roll_calls = {}  # label -> RollCall
        self._left = 0
        self._compressed = 0  # number of compressed gradients that have come
        self._gradients_made = gradients_made

    def begin_delivery(self):
        """Note that the first result is requested."""
        if self.owned:
            expect_synchronized()
        self.delivering = True

    def compared(self, slot):
        """Return what ranks compare in the probe of a slot: configuration, step and loss scale."""
        return self.buckets.fingerprint, slot.steps - 1, self.loss_scale

    def ends_before(self, slot, gradients_made):
        """Return whether a gradient of ``slot`` belongs to another step.

        The step of an optimizer accepts no more gradients after its first result. Gradients
        without an optimizer come one by one, so their step ends with the next backward pass, which
        shows in ``gradients_made``, the number of gradients that backward has made so far.
        """
        if self.closed or slot.last_step is self:
            return True
        return self.delivering and (self.owned or gradients_made != self._gradients_made)

    def add(self, slot, policy_of):
        """Add a slot whose gradient has come; the step's layout says how it is sent.

        Args:
            slot: the slot.
            policy_of: function of a slot that returns its policy now, for gradients without an
                optimizer: their step may begin before it is known that one is of a table.
        """
        slot.last_step = self
        # only now: its previous gradient may still have been in flight when the layout changed
        slot.policy = self.layout.policies[slot.name] if self.owned else policy_of(slot)
        slot.continues = self.continues
        self.slots.append(slot)
        self._compressed += not slot.dense
        self._left += 1

    def flight_for(self, slot, call):
        """Return the flight that a slot's gradient joins.

        Args:
            slot: slot of the gradient.
            call: function of a label that starts a
                :class:`~deepreduce_hvd.coordination.roll_call.RollCall`. The first gradient calls
                it, so that the result is there when backward has made the bucket's other gradients.
        """
        self.exchanged = False
        number, bucket = self.buckets.bucket_of(slot)
        if number not in self._flights:
            self._flights[number] = Flight(bucket, self.buckets.communicator_of(bucket[0]))
        flight = self._flights[number]
        if flight.roll_call is None:
            label = self.buckets.called_for(slot)
            if label not in self._roll_calls:
                self._roll_calls[label] = call(label)
                flight.called_by = slot
            flight.roll_call = self._roll_calls[label]
        return flight

    @property
    def owned(self):
        """Whether the gradients are those of an optimizer."""
        return isinstance(self.buckets, OptimizerBuckets)

    @property
    def more_to_come(self):
        """Whether backward has yet to compute compressed gradients of the optimizer."""
        return self.owned and self._compressed < self.buckets.gradients

    @property
    def flights(self):
        return list(self._flights.values())

    def may_continue(self, last):
        """Return whether gradients of this step may be added to those of an earlier one."""
        return (
            self.owned
            and self.loss_scale == last.loss_scale  # a scaler updates it between two steps
            # gradients that do not come from backward replace the earlier ones
            and self._gradients_made != last._gradients_made
        )

    @property
    def complete(self):
        """Whether all results have been returned."""
        return self.delivering and self._left == 0

    @property
    def in_progress(self):
        """Whether it is an optimizer's, and results are still to come."""
        return self.owned and not self.complete and not self.closed

    def hand_over(self, slot, flight=None):
        """Count a returned result.

        After the last result of a flight, the flight and its gradients are released.
        """
        self._left -= 1
        if flight is not None and flight.hand_over():
            del self._flights[self.buckets.bucket_of(slot)[0]]


class OptimizerSteps:
    """The steps of the optimizers of one compressor: which step a gradient belongs to.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        parameters: its :class:`~deepreduce_hvd.torch.parameters.Parameters`.
        tables: its :class:`~deepreduce_hvd.adapters.embedding_tables.EmbeddingTables`.
        layout: the :class:`~deepreduce_hvd.planning.layout.Layout` of the first steps.
    """

    def __init__(self, compressor, parameters, tables, layout):
        self._compressor = compressor
        self._parameters = parameters
        self._tables = tables
        #: None if neither loss scaling nor a memory needs it
        self._accumulation = (
            Accumulation(parameters, hooks=True)
            if compressor.loss_scale is not None or any_needs_new_gradients(parameters)
            else None
        )
        self.forget(layout)

    def forget(self, layout):
        """Forget all steps; the next ones have this layout."""
        # optimizer -> its last OptimizerStep
        self._last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # optimizers of which a step has begun, or has results, in the job's step
        self._stepping: weakref.WeakSet = weakref.WeakSet()
        self._with_results: weakref.WeakSet = weakref.WeakSet()
        self._apart = SeparateBuckets(self._compressor.fingerprint)
        self._layouts = LayoutChanges(layout)

    def last_of(self, owner):
        """Return the last step of an optimizer, or of :data:`DIRECT`; None if there is none."""
        return self._last.get(owner)

    def joined_by(self, owner, slot):
        """Return the step that a slot's gradient joins, or None if it begins a new one.

        Args:
            owner: the gradient's optimizer, or :data:`DIRECT` for gradients without one.
            slot: slot of the gradient's parameter.

        Raises:
            InvalidArgumentError: another optimizer exchanges the same gradient.
        """
        last = self._last.get(owner)
        other = slot.last_step
        # what backward has made was taken by the hook of another optimizer
        taken = other is not None and other is not last and not slot.made
        if taken and other.in_progress and owner is not DIRECT:
            raise InvalidArgumentError(_TWICE.format(slot.name))
        if last is None or last.ends_before(slot, self._parameters.gradients_made):
            return None
        return last

    def reduces_again(self, owner):
        """Return whether an optimizer's ``step()`` reduces gradients that it has reduced already.

        So it is if backward has made none since then, and the program has not cleared them. False
        if none of them is compressed.
        """
        last = self._last.get(owner)
        if last is None or not last.buckets.gradients:
            return False
        slots = last.buckets.slots
        if any(slot.made for slot in slots) or not is_step_after_synchronize(owner):
            return False
        gradients = [slot.parameter.grad for slot in slots if not slot.dense]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def any_in_progress(self):
        """Return whether results of an optimizer's step are still to come."""
        return any(step.in_progress for step in self._last.values())

    def expect_none_in_progress(self):
        """Raise InvalidArgumentError if results of an optimizer's step are still to come."""
        if self.any_in_progress():
            raise InvalidArgumentError(
                "load_state_dict: expected a call between two steps, got one between backward() and"
                " step(); call optimizer.step() before, or optimizer.synchronize() and zero_grad()"
            )

    def flights_beside(self, step):
        """Return the flights of other steps than ``step`` that have all their gradients.

        Another rank may request those results first.
        """
        return [
            flight
            for other in self._last.values()
            if other is not step and other.owned and not other.closed and not other.more_to_come
            for flight in other.flights
        ]

    def leads(self, owner):
        """Return whether the next step of an optimizer begins a new step of the job.

        It does if this optimizer has already stepped in the current step of the job, which has at
        most one step of each optimizer.
        """
        if owner is DIRECT:
            return False
        first = not self._stepping or owner in self._stepping
        if first:
            self._stepping.clear()
        self._stepping.add(owner)
        return first

    def ends_with(self, step):
        """Return whether a step of the job ends with this complete step of an optimizer.

        Ranks wait for each other there. If the optimizer does not have all parameters that are
        trained, the end is put off, see :meth:`ended_before`. Before that, another rank may wait
        for this rank's gradients of another optimizer. If this rank has not used its parameters,
        Horovod passes their zeros only when that one steps.
        """
        return step.leads and step.has_all

    def ended_before(self, step):
        """Return whether a step of the job has ended before this step of an optimizer.

        Called when the first result of the step is requested. All ranks request results in the same
        order, or have made all gradients before, so none waits for a gradient of this rank then. In
        backward, other ranks may wait for it.
        """
        owner = next((one for one, last in self._last.items() if last is step), DIRECT)
        if step.has_all or owner is DIRECT:
            return False
        ended = owner in self._with_results
        if ended:
            self._with_results.clear()
        self._with_results.add(owner)
        return ended

    def end_step_of_job(self, scheduler, transport, slots):
        """End a step of the job. All ranks do so at the same step of an optimizer.

        Args:
            scheduler: the :class:`~deepreduce_hvd.planning.scheduler.Scheduler`, which may change
                the layout of later steps.
            transport: transport over the ranks.
            slots: slots of all parameters, by name.
        """
        before = scheduler.layout
        scheduler.step_ends(transport, slots)
        if scheduler.layout is not before:
            begun = scheduler.figures.slowest(transport, self._layouts.begun(slots))
            self._layouts.change(scheduler.layout, slots, begun)

    def begin(self, owner, device_sums, layout, ranks, leads):
        """Begin a step of an optimizer, or of :data:`DIRECT`, and return it.

        Args:
            owner: the optimizer, or :data:`DIRECT`.
            device_sums: the sums of this step on devices.
            layout: the :class:`~deepreduce_hvd.planning.layout.Layout` of gradients without an
                optimizer.
            ranks: list of the global ranks that take part.
            leads: what :meth:`leads` returned.
        """
        last = self._last.get(owner)
        buckets, has_all = self._apart, False
        if owner is not DIRECT:
            slots, has_all = self._slots_of(owner)
            layout = self._tables.layout_of(self._layouts.begin(slots[0].name), slots)
            buckets = self._buckets_of(owner, slots, layout)
        step = self._last[owner] = OptimizerStep(
            buckets, layout, ranks, self._loss_scale(), device_sums,
            self._parameters.gradients_made, leads,
        )  # fmt: skip
        step.has_all = has_all
        if last is not None and self._goes_on(last, step):
            # NaN or Inf is still there, and the optimizer skips the whole step
            step.continues, step.void = True, last.void
        return step

    def _goes_on(self, last, step):
        """Return whether a step of an optimizer is one step of the program with its last one."""
        return (
            self._accumulation is not None
            and self._compressor.loss_scale is not None
            and step.may_continue(last)
            and self._accumulation.any_goes_on(step.buckets.slots)
        )

    def note_exchange(self, slot, step=None):
        """Note that the gradient of a slot is reduced, with all that was added to it before.

        Args:
            slot: the slot, whose ``refused`` is set.
            step: the step that the gradient joins; None if Horovod reduces it alone.
        """
        accumulation = self._accumulation
        if accumulation is not None:
            made = step is not None and step.owned and slot.made
            slot.refused = made and accumulation.refuses(slot)
            accumulation.exchanged(slot)

    def _slots_of(self, owner):
        """Return the slots of an optimizer's parameters, and whether no others are trained.

        Horovod also exchanges those that were taken out of its groups.
        """
        owned = {id(parameter) for group in owner.param_groups for parameter in group["params"]}
        owned.update(id(parameter) for parameter in owner._requires_update)
        slots, has_all = [], True
        for slot in self._parameters:
            if id(slot.parameter) in owned:
                slots.append(slot)
            elif slot.parameter.requires_grad:
                has_all = False
        return slots, has_all

    def _buckets_of(self, owner, slots, layout):
        """Return the buckets of the gradients of an optimizer, which has these slots.

        They are those of its last step, unless the parameters that it trains or the layout have
        changed.
        """
        last = self._last.get(owner)
        if (
            last is not None
            and last.buckets.slots == slots
            and last.buckets.training == OptimizerBuckets.trains(slots)
            and last.buckets.layout is layout
        ):
            return last.buckets
        return OptimizerBuckets(slots, self._compressor.bucket_bytes, layout)

    def _loss_scale(self):
        """Return the current loss scale, or None without loss scaling."""
        function = self._compressor.loss_scale
        return None if function is None else expect_loss_scale(float(function()))
