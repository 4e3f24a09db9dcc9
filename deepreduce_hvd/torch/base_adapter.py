"""What the adapters of PyTorch share: schedules, warnings, and the count of steps."""

import weakref

import torch

from deepreduce_hvd.adapters import embedding_tables
from deepreduce_hvd.adapters.base_adapter import BaseAdapter
from deepreduce_hvd.planning.scheduler import Scheduler
from deepreduce_hvd.planning.step_times import StepTimes
from deepreduce_hvd.statistics import write_scalars
from deepreduce_hvd.torch import discards
from deepreduce_hvd.torch.ops import WHY_NO_OPERATORS
from deepreduce_hvd.torch.parameter_groups import inner_of
from deepreduce_hvd.torch.pending import time_fp16
from deepreduce_hvd.torch.unknown_scale import UnknownScale
from deepreduce_hvd.user_warnings import warn

#: topics of warnings after which the program may discard gradients, or is told that it does
_DISCARDED = {"discarded", "non-finite"}


class TorchAdapter(BaseAdapter):
    """The PyTorch side of a compressor, common to Horovod and torch.distributed.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        transport: transport over the ranks that take part.
        buckets, on_host: as for :class:`~deepreduce_hvd.planning.scheduler.Scheduler`.

    Attributes:
        times: the :class:`~deepreduce_hvd.planning.step_times.StepTimes`.
        scheduler: the :class:`~deepreduce_hvd.planning.scheduler.Scheduler`.
        layout: the :class:`~deepreduce_hvd.planning.layout.Layout` of the steps from now on.
        tables: the :class:`~deepreduce_hvd.adapters.embedding_tables.EmbeddingTables`.
        is_in_step: function that returns whether gradients were exchanged that no optimizer has
            used yet.
    """

    def __init__(self, compressor, transport, buckets=lambda: None, on_host=False):
        super().__init__(compressor, transport)
        self.times = StepTimes()
        self.scheduler = Scheduler(
            compressor, self.times, time_fp16, buckets, on_host, tables=self.known_tables
        )  # fmt: skip
        self.layout = self.scheduler.layout
        self.is_in_step = lambda: False
        self._warned = set()
        self._with_momentum: weakref.WeakSet = weakref.WeakSet()  # optimizers that were named
        self.tables = embedding_tables.EmbeddingTables(compressor, self._is_on_gpu)
        if compressor.loss_scale is None:
            self._unknown_scale = UnknownScale(self)
        self.warn_of_plan()
        if WHY_NO_OPERATORS is not None:
            self._warn_once(
                "operators",
                "gradients are compressed without the PyTorch operators, which takes a little"
                " longer, and those on a GPU are compressed on the host:"
                f" {WHY_NO_OPERATORS.removeprefix('deepreduce_hvd: ')}",
            )

    @property
    def plan(self):  # type: ignore[override]  # the scheduler knows it
        """The plan of the next step, or None."""
        return self.scheduler.layout.plan

    def profile(self):
        """Return the profile of this rank, as :meth:`Compressor.profile`."""
        return self.scheduler.profile(self.slots, self.transport.size)

    def timeline(self, path):
        """Write the last step as a trace, as :meth:`Compressor.timeline`."""
        self.times.write(path, self.layout.plan)

    def known_tables(self):
        """Return the names of the embedding tables, the same on all ranks in a step of the job."""
        return embedding_tables.names_of(self.slots)

    def notes(self):
        return [*super().notes(), *self.scheduler.notes(embedding_tables.names_of(self.slots))]

    def warn_if_in_step(self):
        """Warn once if a state that is saved now does not fit the weights."""
        if self.is_in_step():
            self._warn_once(
                "state",
                "state_dict: expected a call between two steps, got one between backward() and"
                " step(); what this step sends is neither in the weights nor in the residuals, so"
                " training that resumes from this state loses it; save after optimizer.step()",
            )

    def state_dict(self):
        """Return the state of this rank."""
        self.warn_if_in_step()
        return super().state_dict()

    def load_state_dict(self, state):
        """Check a state, or the list of all ranks' states, and load it."""
        super().load_state_dict(state)
        self.follow_tables()

    def progress(self):
        """Return the number of steps that this compressor has begun."""
        return max((slot.steps for slot in self.slots.values()), default=0)

    def _end_step(self, slots, void):
        """End a step: undo it if it is void, and write scalars.

        Args:
            slots: slots of the step's gradients.
            void: whether the optimizer skips the step.
        """
        if void:
            for slot in slots:
                slot.restore()
        writer, steps = self.compressor.writer, self.progress()
        # a pass that only accumulates has no gradients
        if writer is not None and slots and steps % self.compressor.writer_interval == 0:
            write_scalars(writer, self.stats(), steps)

    def look_for_table(self, slot, gradient):
        """Look at a gradient of a parameter that may be an embedding table.

        Args:
            slot: slot of the parameter.
            gradient: its gradient, of any shape, which may be that of some rows only.

        Returns:
            What :meth:`~deepreduce_hvd.adapters.embedding_tables.EmbeddingTables.note_rows`
            returns; (False, False) if the gradient need not be looked at, or has NaN or Inf: its
            step may be repeated with another loss scale.
        """
        if not self.tables.expects(slot) or not gradient.numel():
            return False, False
        rows = gradient.detach().reshape(-1, slot.shape[1])
        if not torch.isfinite(rows).all():
            return False, False
        return self.tables.note_rows(slot, (rows != 0).any(dim=1).numpy(force=True))

    def warn_of_tables(self):
        """Warn once about the embedding tables that are delayed."""
        delayed = self.tables.take_delayed()
        if delayed:
            self._warn_once("tables", embedding_tables.warning(delayed, self.compressor))

    def follow_tables(self):
        self.tables.forget_rows()
        self.tables.follow(self.slots)

    def _is_on_gpu(self, name):
        """Return whether the gradient of a parameter is encoded on a GPU."""
        return False

    def look_for_discarded(self, slot, parameters):
        """Warn once if the program has discarded the last gradient of a parameter.

        Called when the next one is exchanged. With loss scaling, a step that is skipped is undone.

        Args:
            slot: slot of the parameter.
            parameters: what tells its attribute ``discards`` of gradients that backward makes.
        """
        if self.compressor.loss_scale is not None:
            return
        if not self._warned.isdisjoint(_DISCARDED):
            parameters.discards = None
            return
        if parameters.discards is None:
            policies = self.compressor.policies
            parameters.discards = discards.Discards(
                one for name, one in self.slots.items() if policies[name].delays
            )
        if parameters.discards.found_in(slot) and slot.policy.delays:
            self._warn_once("discarded", discards.warning(slot))

    def warn_of_non_finite(self, name):
        """Warn once about the NaN or Inf of a parameter, unless the compressor scales losses."""
        if self.compressor.loss_scale is None:
            self._warn_once(
                "non-finite",
                f"parameter {name}: every rank gets NaN or Inf, because the gradient of a rank"
                " contains it or because the sum is too large; if the optimizer skips such steps,"
                " as with loss scaling, give Compressor loss_scale=scaler.get_scale so that"
                " residuals keep what a skipped step sent",
            )

    def warn_of_unknown_scale(self):
        """Warn once that a scaler steps the optimizer of a compressor without ``loss_scale``."""
        self._warn_once(
            "scale",
            "a GradScaler scales the loss, but the compressor does not know the scale. After the"
            " scale has changed, or the scaler has skipped a step, residuals are wrong. Write"
            " dr.Compressor(..., loss_scale=scaler.get_scale)",
        )

    def warn_of_momentum(self, optimizer, message):
        """Warn once about an optimizer with momentum, unless ``message`` is None."""
        optimizer = inner_of(optimizer) or optimizer
        if message is not None and optimizer not in self._with_momentum:
            self._with_momentum.add(optimizer)
            warn(message)

    def _warn_once(self, topic, message):
        if topic not in self._warned:
            self._warned.add(topic)
            warn(message)
