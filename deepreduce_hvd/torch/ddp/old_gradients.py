"""Old gradients of parameters that no rank has used in a backward pass.

With ``find_unused_parameters`` or ``static_graph``, DDP copies ``parameter.grad`` into the bucket
of each parameter, also if no rank has used it in this pass. Then it discards the result, because
``parameter.grad`` must not change. So nothing of such a gradient may enter a residual.

Communicators that encode sums leave such parameters out: a lossy index codec may add elements to
the sum, and residuals would correct elements that DDP discards.
"""

import numpy as np
import torch

from deepreduce_hvd.coordination.collective_names import collective_name


class OldGradients:
    """The gradients of one bucket that backward may not have made.

    Args:
        adapter: the :class:`~deepreduce_hvd.torch.ddp.base.DistributedAdapter`.
        slots: slots of the bucket's parameters, before this step is counted.
        gradients: views of the bucket, one for each slot.

    Attributes:
        found: whether this rank has a gradient that its backward pass did not make, other than
            zeros, or one that a communicator must leave out if no rank has made it.
        left_out: numbers of the gradients to leave out, after :meth:`clear`.
        sent_bytes: bytes that :meth:`clear` has passed to collectives.
    """

    def __init__(self, adapter, slots, gradients):
        self._transport = adapter.transport
        self._made = np.array([slot.made for slot in slots], dtype=np.uint8)
        self._old = {
            number: gradient
            for number, (slot, gradient) in enumerate(zip(slots, gradients))
            if not slot.made and bool(gradient.any())
        }
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients and copies of them
        name = collective_name(adapter.compressor.number, slots[0].name)
        self._name = f"{name}.step {slots[0].steps + 1}.used"
        self._in_sums = {
            number
            for number, slot in enumerate(slots)
            if not slot.made and adapter.encodes_sums_of(slot)
        }
        self.found = bool(self._old or self._in_sums)
        self.left_out: set[int] = set()
        self.sent_bytes = 0

    def clear(self):
        """Set old gradients that no rank uses to zero, so that their residuals stay as they are.

        All ranks call this. If no rank has old gradients, it is one collective without data.
        """
        used = self._used_by_any()
        self.left_out = {number for number in self._in_sums if not used[number]}
        for number, gradient in self._old.items():
            if not used[number]:
                self._kept.append((gradient, gradient.clone()))
                gradient.zero_()

    def _used_by_any(self):
        """Return whether backward has made each gradient on any rank, (n,)."""
        transport = self._transport
        if transport.size == 1:
            return self._made
        self.sent_bytes = transport.head_bytes
        if not transport.wait(transport.any(self.found, self._name)):
            return self._made
        self.sent_bytes += transport.head_bytes + self._made.size
        rows = transport.wait(transport.allgather(self._made, f"{self._name} by"))
        return rows.reshape(transport.size, -1).any(axis=0)

    def put_back(self):
        """Undo :meth:`clear`, once the bucket has its results."""
        for gradient, kept in self._kept:
            gradient.copy_(kept)
