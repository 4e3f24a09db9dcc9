"""Which steps an optimizer skips with loss scaling, where its parameters are not known in advance.

A scaler skips an optimizer if one of its own gradients has NaN or Inf. DDP does not know the
optimizers, and some parameters may have none, so that nothing clears their gradients. But an
optimizer tells when it steps. So a step is undone if its gradients are cleared before an optimizer
has stepped them, while some gradient has NaN or Inf.
"""

from deepreduce_hvd.torch.accumulation import Accumulation


class VoidSteps(Accumulation):
    """The steps of all parameters of one compressor; undoes those that an optimizer skips.

    Args:
        slots, hooks: as for :class:`~deepreduce_hvd.torch.accumulation.Accumulation`.
    """

    def __init__(self, slots, hooks):
        super().__init__(slots, hooks)
        self._slots = list(self._by_id.values())
        self._stepped = set()  # tuples of slots that an optimizer has stepped together
        self._loss_scale = None

    def begin_step(self, optimizer):
        slots = super().begin_step(optimizer)
        # a GPU may not have told yet which gradients are finite, so this is looked at later
        self._stepped.add(tuple(slot for slot in slots if slot.parameter.grad is not None))
        return slots

    def begin(self, loss_scale):
        """Begin a backward pass: undo the steps that were skipped before it.

        ``continues`` of each slot is set. The results of the last pass are known.

        Args:
            loss_scale: loss scale of the pass.
        """
        self.watch()
        void = self._is_any_void()
        same = loss_scale == self._loss_scale  # a scaler updates it between two steps
        self._loss_scale = loss_scale
        for slot in self._slots:
            slot.skipped = False
            slot.continues = same and (slot.changes or slot.void) and self.goes_on(slot)
            if slot.continues:
                continue
            if void and slot.changes:
                slot.restore()
            slot.changes = slot.void = False

    def show_skipped(self):
        """Have a memory read as before its step, if that is skipped unless an optimizer steps it.

        The step may go on, so the memory itself stays as it is until :meth:`begin`.
        """
        void = self._is_any_void()
        for slot in self._slots:
            slot.skipped = void and slot.changes
            if slot.skipped:
                slot.payload = None

    def _is_any_void(self):
        """Keep what the optimizers have applied; return whether any gradient has NaN or Inf."""
        for slots in self._stepped:
            # a fused optimizer is also called for a step that it skips
            if not any(slot.void for slot in slots):
                for slot in slots:
                    slot.changes = False
        self._stepped.clear()
        return any(slot.void for slot in self._slots)

    def forget(self):
        """Discard the step in progress."""
        self._stepped.clear()
        for slot in self._slots:
            slot.changes = slot.continues = slot.void = slot.skipped = False
