"""Gradients of a job of one rank, which sends nothing, so that nothing needs to be compressed."""

import numpy as np
import torch

from deepreduce_hvd.stages import calls
from deepreduce_hvd.stages.memories.residual import Residual


def with_whole_memory(slot, gradient, made, loss_scale):
    """Return a gradient plus what a larger job has left in the memory.

    It is added once, or with LowPass over several steps.

    The memory's own rule applies, as if a payload had all elements. A gradient with NaN or Inf, and
    zeros that backward did not make, leave the memory as it is.

    Args:
        slot: the :class:`~deepreduce_hvd.torch.slot.Slot` of the parameter.
        gradient: the gradient.
        made: whether backward made it.
        loss_scale: loss scale of this step, or None.

    Returns:
        ``gradient`` itself if the memory has nothing; else a new tensor of its shape and dtype.
    """
    slot.payload = None
    # the residual of an embedding table is that of the steps before it was found
    if not slot.encoder_state or type(slot.policy.memory) is Residual:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        return slot.with_memory(gradient, made, loss_scale, 1, dtype, divides=False)
    slot.changes = slot.changes and slot.continues
    slot.follow_loss_scale(loss_scale)
    if not slot.remembers or not bool(gradient.isfinite().all()):
        return gradient
    if not (made or bool(gradient.any())):
        return gradient
    slot.back_up()
    memory, own = slot.policy.memory, gradient.detach().float().cpu().reshape(-1).numpy()
    state = tuple(part.cpu().numpy() for part in slot.state)
    accumulated, state = calls.accumulate(memory, own, state)
    limit = min(torch.finfo(gradient.dtype).max, torch.finfo(torch.float32).max)
    total = (
        torch.from_numpy(np.require(accumulated, requirements="W"))
        .clamp(-limit, limit)
        .to(gradient.dtype)
    )
    everything = np.arange(own.size, dtype=np.uint32)
    sent = total.float().numpy()
    new = calls.update(memory, own, accumulated, state, everything, sent)
    for part, kept in zip(slot.state, new):
        part.copy_(torch.from_numpy(kept))
    slot.remembers = any(bool(part.any()) for part in slot.state)
    return total.view(gradient.shape).to(gradient.device)
