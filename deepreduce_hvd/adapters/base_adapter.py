"""What the adapters of all frameworks share: the state of their slots and what ranks compare."""

from deepreduce_hvd.adapters import embedding_tables
from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.coordination.compared_settings import known_tables, step_counters
from deepreduce_hvd.coordination.launchers import is_elastic, why_alone
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.planning import layout
from deepreduce_hvd.planning.policies import some_of
from deepreduce_hvd.schedule.dag import FP16
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.user_warnings import warn

_TENSORFLOW_ONLY = (
    "{}: expected a compressor of TensorFlow variables, got one of PyTorch parameters"
)


class BaseAdapter:
    """Base class of adapters: the part of a compressor that is specific to one framework.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        transport: transport over the ranks of its process set.

    Attributes:
        process_set: the Horovod process set.
        slots: name of a parameter -> its slot, which has the state.
        elastic: the :class:`~deepreduce_hvd.coordination.elastic.MemoryKeeper` of the elastic state
            that has this compressor, or None.
        agreed: whether the handshake is done.
    """

    def __init__(self, compressor, transport):
        self.compressor = compressor
        self.transport = transport
        self.process_set = transport.process_set
        self.slots = {}
        self.elastic = None

    def close_steps(self):
        """End all complete steps, and undo those that are void.

        Called before anything reads or changes state between two steps.
        """
        raise NotImplementedError

    def forget_steps(self):
        """Discard the steps in progress."""
        raise NotImplementedError

    def abandon(self):
        """Discard a step that cannot finish, and everything known about the other ranks.

        The set of ranks may have changed.
        """
        handshake.forget(self)
        self.forget_steps()
        self.transport.reset()
        self.compressor.communicator.reset()

    def expect_open(self):
        """Raise InvalidArgumentError if the compressor is closed; do nothing otherwise."""

    def close(self):
        """Free the memories and refuse every further use, as :meth:`Compressor.close`."""
        self.forget_steps()
        for slot in self.slots.values():
            slot.release()
        self.slots = {}
        self.agreed = True  # it takes part in no handshake
        self.compressor.adapter = self.make_closed()

    def framework_settings(self):
        """Return the settings that only ranks of this framework compare in the handshake."""
        return []

    def follow_tables(self):
        """Send gradients as ``is_table`` of the slots says, after a state was loaded."""

    @staticmethod
    def make_closed():
        """Return the adapter of the compressor after :meth:`close`."""
        return ClosedAdapter()

    #: the :class:`~deepreduce_hvd.schedule.Plan` of the next step, or None
    plan = None

    def profile(self):
        """Return the profile of this rank, as :meth:`Compressor.profile`."""
        raise NotImplementedError

    def timeline(self, path):
        """Write the last step as a trace, as :meth:`Compressor.timeline`."""
        raise NotImplementedError

    def bound_to(self, variables):
        """Return the view for some variables, as :meth:`Compressor.bound_to`."""
        raise InvalidArgumentError(_TENSORFLOW_ONLY.format("bound_to"))

    @property
    def trackable(self):
        """The state for a checkpoint of TensorFlow, as :attr:`Compressor.trackable`."""
        raise InvalidArgumentError(_TENSORFLOW_ONLY.format("trackable"))

    def frozen(self):
        """Return the names of the parameters that are not trained."""
        return {name for name, slot in self.slots.items() if slot.frozen}

    @property
    def speaks(self):
        """Whether this rank prints what is the same on all ranks."""
        return self.transport.includes_this_rank and self.transport.rank == 0

    def warn_of_plan(self):
        """Warn on the first rank if the compressor's plan was made for another job."""
        schedule = self.compressor.schedule
        # on TensorFlow, a compressor may be created before hvd.init()
        if schedule is None or schedule == "auto" or not self._knows_ranks():
            return
        if self.speaks:
            ranks = self.transport.size
            for message in layout.differences_of(schedule, self.compressor.policies, ranks):
                warn(message)

    def warn_of_horovod(self):
        """Warn of what Horovod, as it was built and started, does not do for this compressor."""
        self._warn_if_alone()
        self._warn_of_float16()

    def _warn_if_alone(self):
        """Warn if this process is a job of Horovod of its own, but others were started with it."""
        horovod = self.transport.horovod
        why = why_alone() if horovod.is_initialized() and horovod.size() == 1 else None
        if why is not None:
            warn(why)

    def _warn_of_float16(self):
        """Warn if Horovod sums float16 of a scaled loss, and omits numbers from some sums."""
        if self.compressor.loss_scale is None or not self._knows_ranks() or not self.speaks:
            return
        policies, schedule = self.compressor.policies, self.compressor.schedule
        if isinstance(schedule, Plan):
            policies = layout.of_plan(policies, self.compressor.fingerprint, schedule).policies
        names = [name for name, policy in policies.items() if policy.way == FP16]
        if names and self.transport.size > 1 and not self.transport.sums_float16(on_host=True):
            warn(
                "Horovod's Gloo omits numbers from some sums of float16 above 1,000, and gradients"
                f" are large with loss_scale=, got 'fp16' for {some_of(names)}; write 'dense', or"
                " dr.Codec(dr.NoneSparsifier(), value=dr.Float16())"
                " (docs/schedule.md#sums-of-float16)"
            )

    def _knows_ranks(self):
        """Return whether Horovod is initialized, or is not used."""
        horovod = getattr(self.transport, "horovod", None)
        return horovod is None or horovod.is_initialized()

    def sends_nothing(self, slot):
        """Return whether the memory of a slot is not used, because there is only one rank."""
        return False

    def unregistered(self):
        """Return what to do about ranks that this compressor does not know; None without them."""
        return None

    def why_unused(self, slots):
        """Return why none of these slots' gradients were exchanged; None if that is no mistake."""
        return self.unregistered()

    def names_by_id(self):
        """Return {id of a parameter: its name}, which tells whether compressors share parameters.

        A closed compressor has none.
        """
        return {id(slot.parameter): name for name, slot in self.slots.items()}

    def notes(self):
        """Return sentences on tables and the schedule, for :meth:`Compressor.summary`."""
        return embedding_tables.notes(self.slots)

    def describe(self, with_steps):
        """Return the settings that must be equal on all ranks, for the handshake.

        Args:
            with_steps: whether step counters and known embedding tables must be equal too.
        """
        return [
            *self.compressor.settings(self.transport),
            *self.framework_settings(),
            *([step_counters(self.slots), known_tables(self.slots)] if with_steps else []),
        ]

    def stats(self):
        """Return one row of statistics per parameter, under its last name if it has several."""
        others = self.compressor.other_names
        return {name: slot.statistics() for name, slot in self.slots.items() if name not in others}

    def keeper_of(self, rank):
        """Return the rank whose memory stores the residuals of ``rank``."""
        return self.compressor.communicator.keeper_of(rank, self.transport)

    def expect_member(self, what):
        """Raise InvalidArgumentError on a rank outside of the process set, which has no state."""
        if not self.transport.includes_this_rank:
            raise InvalidArgumentError(
                f"{what}: expected a rank of the compressor's process set, {self.transport.ranks},"
                f" got rank {self.transport.horovod.rank()}; leave it out on this rank"
            )

    def state_dict(self):
        """Return the state of this rank."""
        self.expect_member("state_dict")
        self.close_steps()
        return checkpoint.dump(
            self.slots, self.compressor.configuration, self.transport.rank, self.transport.size
        )

    def load_state_dict(self, state):
        """Check a state, or the list of all ranks' states, and load it."""
        self.expect_member("load_state_dict")
        self.close_steps()
        checkpoint.load(
            self.slots,
            state,
            self.compressor.configuration,
            self.transport.rank,
            self.transport.size,
            self.keeper_of,
        )
        self._warn_of_unused_memory()

    def _warn_of_unused_memory(self):
        """Warn of residuals that were loaded in a job of one rank of Horovod, which uses none."""
        horovod = getattr(self.transport, "horovod", None)
        if horovod is None or horovod.size() > 1 or is_elastic():
            return
        if any(slot.state and slot.steps for slot in self.slots.values()):
            warn(
                "load_state_dict: Horovod calls no compressor in a job of one rank, so the loaded"
                " residuals are not applied; use two ranks or more"
            )


class ClosedAdapter:
    """The adapter of a compressor after ``close``: refuses every use."""

    def close(self):
        """Do nothing: it is closed."""

    def sends_nothing(self, slot):
        """Return False: optimizers continue as they were."""
        return False

    def why_unused(self, slots):
        """Return None: it is no mistake."""
        return None

    def __getattr__(self, name):
        self.refuse()

    @staticmethod
    def refuse():
        """Raise InvalidArgumentError."""
        raise InvalidArgumentError(
            "Compressor: expected one that is not closed, got one after close(); create another one"
            " and give it to the optimizer, tape or model. If you have done so, an older"
            " hvd.DistributedOptimizer of the same parameters still has the closed one: before you"
            " create the new optimizer, delete the old one and the last loss, whose graph refers to"
            " it, and call gc.collect()"
        )
