"""The tensors for sums: memory, strides and dtype that the optimizer expects."""

import math

import numpy as np
import torch

from deepreduce_hvd.numerics.exact_math import is_nonzero

_FLOAT32_MAX = torch.finfo(torch.float32).max


def may_overlap(tensor):
    """Return whether two elements of a tensor may share memory, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    extent = 1  # number of elements that the smaller strides span
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def layout_for(gradient, parameter, made):
    """Return the tensor whose strides the sum must have: those that the optimizer expects.

    Args:
        gradient: the gradient that was compressed.
        parameter: its parameter.
        made: whether backward made the gradient. If so, its strides are those that PyTorch chose.
            Otherwise Horovod made it contiguous, while fused optimizers expect the parameter's
            strides.
    """
    return (
        gradient
        if (made or gradient.stride() == parameter.stride()) and not may_overlap(gradient)
        else parameter
    )


def memory_for(gradient, parameter, made, in_place):
    """Return a tensor of the gradient's shape and dtype for its sum.

    It has the strides of :func:`layout_for`. With ``in_place`` it is the gradient's own memory,
    where possible. A gradient that was made in inference mode cannot be written outside of it, so
    its sum has memory of its own.
    """
    like = layout_for(gradient, parameter, made)
    if in_place and like is gradient and not gradient.is_inference():
        return gradient.detach()
    return torch.empty_like(like, dtype=gradient.dtype, device=gradient.device, requires_grad=False)


def as_float32(result):
    """Return a (d,) float32 view of ``result``, or None if its dtype or strides prevent one."""
    return result.view(-1) if result.dtype == torch.float32 and result.is_contiguous() else None


def may_exceed(dtype, largest):
    """Return whether float32 numbers may become NaN or Inf in ``dtype``.

    ``largest`` bounds their magnitudes; it may be NaN.
    """
    return not largest <= min(torch.finfo(dtype).max, _FLOAT32_MAX)


def is_finite(result):
    """Return whether a tensor on the host has neither NaN nor Inf."""
    if not result.numel():
        return True
    # both ends are NaN if any number is; isfinite of all numbers takes over ten times as long
    return all(math.isfinite(end.item()) for end in torch.aminmax(result))


def sparse_like(like, indices, values):
    """Return a sum in the layout of a parameter's sparse gradient.

    The result has whole slices of the gradient's dense dimensions, without those that are zero.

    Args:
        like: the parameter's sparse gradient.
        indices: (n,) NumPy array of distinct flat indices in the dense tensor.
        values: (n,) float32 NumPy array.
    """
    nonzero = is_nonzero(values)
    flat = torch.from_numpy(indices[nonzero].astype(np.int64))
    values = torch.from_numpy(values[nonzero])
    sparse_shape = like.shape[: like.sparse_dim()]
    slice_size = int(torch.Size(like.shape[like.sparse_dim() :]).numel())
    rows, of_row = torch.unique(flat // slice_size, return_inverse=True)
    slices = torch.zeros(rows.numel() * slice_size, dtype=torch.float32, device="cpu")
    slices[of_row * slice_size + flat % slice_size] = values
    indices = torch.stack(torch.unravel_index(rows, sparse_shape))
    slices = slices.view(-1, *like.shape[like.sparse_dim() :]).to(like.dtype)
    # the checks would copy indices from a GPU; without a choice, PyTorch warns
    return torch.sparse_coo_tensor(
        indices, slices, like.shape, is_coalesced=True, check_invariants=False
    ).to(like.device)
