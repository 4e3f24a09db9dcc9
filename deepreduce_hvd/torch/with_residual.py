"""Uncompressed gradients that take the residual along."""

import torch

from deepreduce_hvd.numerics.float16 import limit_of, unit_of
from deepreduce_hvd.torch import results

#: elements that are rounded at a time on the host, so that what is between stays in the cache
_BLOCK = 1 << 15


def add_residual(gradient, residual, dtype, size, divides):
    """Return what to send for a gradient plus its residual, and leave the rest in the residual.

    If the sum of both has NaN or Inf, the gradient is sent alone, and the residual stays. On a GPU
    this is decided there, because the host would have to wait.

    Args:
        gradient: the gradient, of any shape and floating dtype.
        residual: (d,) float32, on the same device; changed in place.
        dtype: dtype of the message. Float16 is rounded, and the rounding error is left. The other
            ones are exact.
        size: number of ranks.
        divides: whether the sum is divided as ``dtype``.

    Returns:
        Two values. The first is what to send: the gradient itself if it is sent alone, otherwise a
        tensor of its shape with ``dtype``. On a GPU it always is the latter. The second is whether
        the residual is empty now; on a GPU it may be a flag there, () bool.
    """
    rounds = torch.float16 in (dtype, gradient.dtype)
    own = gradient.detach()
    if rounds and not own.is_cuda:
        sent = _rounded_in_blocks(own.reshape(-1), residual, dtype, size, divides)
        return (gradient if sent is None else sent.view(gradient.shape)), False
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    kept = residual.view(own.shape)
    total = own + kept
    if not own.is_cuda:
        if not results.is_finite(total):
            return gradient, False
        residual.zero_()
        return total, True
    finite = torch.isfinite(total).all()
    sent, left = total, torch.zeros_like(kept)
    if rounds:
        sent = _in_range(total, dtype, size, divides)
        left = (total - sent).to(kept.dtype)
    kept.copy_(torch.where(finite, left, kept))
    return torch.where(finite, sent, own.to(dtype)), False if rounds else finite


def _rounded_in_blocks(own, residual, dtype, size, divides):
    """Do the same on the host for (d,) numbers; return None if they are to be sent alone."""
    blocks = list(zip(own.split(_BLOCK), residual.split(_BLOCK)))
    if not all(results.is_finite(part + kept) for part, kept in blocks):
        return None
    sent = torch.empty(own.shape, dtype=dtype, device="cpu")
    for out, (part, kept) in zip(sent.split(_BLOCK), blocks):
        total = part + kept  # float32, or float64
        out.copy_(_in_range(total, dtype, size, divides))
        kept.copy_(total.sub_(out))
    return sent


def _in_range(total, dtype, size, divides):
    """Return ``total`` as ``dtype``, such that sums over all ranks are in the range of float16."""
    limit = limit_of(size)
    if dtype != torch.float16:
        return total.clamp(-limit, limit)
    if not divides:
        return total.clamp(-limit, limit).half()
    unit = unit_of(size, 1 << (size - 1).bit_length())
    return (total / unit).round_().mul_(unit).clamp_(-limit, limit).half()
