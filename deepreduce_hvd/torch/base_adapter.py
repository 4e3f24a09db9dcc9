"""What the adapters of PyTorch share: warnings, and the count of steps."""

import warnings

from deepreduce_hvd.adapters.base_adapter import BaseAdapter
from deepreduce_hvd.statistics import write_scalars
from deepreduce_hvd.torch.ops import WHY_NO_OPERATORS


class TorchAdapter(BaseAdapter):
    """The PyTorch side of a compressor, whatever brings the gradients.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        transport: transport over the ranks that take part.
    """

    def __init__(self, compressor, transport):
        super().__init__(compressor, transport)
        self._rounds_closed = 0
        self._warned = set()
        if WHY_NO_OPERATORS is not None:
            self._warn_once(
                "operators",
                "gradients are compressed by NumPy, which is slower:"
                f" {WHY_NO_OPERATORS.removeprefix('deepreduce_hvd: ')}",
            )

    def progress(self):
        """Return the number of steps that this compressor has begun."""
        return max((slot.steps for slot in self.slots.values()), default=0)

    def _end_round(self, slots, void):
        """End a round: undo it if its step is void, and write scalars.

        Args:
            slots: slots of the round's gradients.
            void: whether the optimizer skips the step.
        """
        if void:
            for slot in slots:
                slot.restore()
        self._rounds_closed += 1
        writer = self.compressor.writer
        if writer is not None and self._rounds_closed % self.compressor.writer_interval == 0:
            write_scalars(writer, self.stats(), self._rounds_closed)

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

    def _warn_once(self, topic, message):
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"deepreduce_hvd: {message}", stacklevel=3)
