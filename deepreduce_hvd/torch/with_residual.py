"""Uncompressed gradients that take the residual along."""

import torch

from deepreduce_hvd.numerics.float16 import limit_of, unit_of
from deepreduce_hvd.torch import results


def add_residual(gradient, residual, dtype, size, divides):
    """Return what to send for a gradient plus its residual, and what is left of both.

    If the sum of both has NaN or Inf, the gradient is sent alone, and the residual stays. On a GPU
    this is decided there, because the host would have to wait.

    Args:
        gradient: the gradient, of any shape and floating dtype.
        residual: (d,) float32, on the same device.
        dtype: dtype of the message. Float16 is rounded, and the rounding error is left. The other
            ones are exact.
        size: number of ranks.
        divides: whether the sum is divided as ``dtype``.

    Returns:
        Three values. The first is what to send: the gradient itself if it is sent alone, otherwise
        a tensor of its shape with ``dtype``. On a GPU it always is the latter. The second is what
        is left, in the gradient's shape, or None for nothing. The third is a flag on the GPU,
        whether all numbers are finite; None on the host.
    """
    own = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    kept = residual.view(gradient.shape)
    total = own + kept
    if not total.is_cuda and not results.is_finite(total):
        return gradient, None, None
    sent, left = total, None
    if torch.float16 in (dtype, gradient.dtype):
        sent = _in_range(total, dtype, size, divides)
        left = total - sent
    if not total.is_cuda:
        return sent, left, None
    finite = torch.isfinite(total).all()
    sent = torch.where(finite, sent, own.to(dtype))
    left = torch.where(finite, torch.zeros_like(kept) if left is None else left, kept)
    return sent, left, finite


def _in_range(total, dtype, size, divides):
    """Return ``total`` as ``dtype``, such that sums over all ranks are in the range of float16."""
    limit = limit_of(size)
    if dtype != torch.float16:
        return total.clamp(-limit, limit)
    if not divides:
        return total.clamp(-limit, limit).half()
    unit = unit_of(size, 1 << (size - 1).bit_length())
    return (total / unit).round_().mul_(unit).clamp_(-limit, limit).half()
