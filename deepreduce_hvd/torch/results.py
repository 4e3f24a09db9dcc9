"""Where a sum goes: the memory, strides and type in which an optimizer gets it."""

import numpy as np
import torch

_FLOAT32_MAX = torch.finfo(torch.float32).max


def may_overlap(tensor):
    """Whether two elements of a tensor may share memory, as those of an expanded one do."""
    extent = 1  # of the memory that the smaller strides reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def layout_for(gradient, parameter, made):
    """The tensor whose strides the sum of a gradient gets: those in which the optimizer expects it.

    Args:
        gradient: what was compressed.
        parameter: whose gradient it is.
        made: whether backward made the gradient. Its strides then are those that PyTorch wants it
            to have. What Horovod makes in its place is contiguous, while fused optimizers go by the
            parameter's strides.
    """
    return (
        gradient
        if (made or gradient.stride() == parameter.stride()) and not may_overlap(gradient)
        else parameter
    )


def memory_for(gradient, parameter, made, in_place):
    """A tensor of the gradient's shape and type for its sum, in the strides of :func:`layout_for`.

    It is the gradient's own memory, when ``in_place`` and where that can be.
    """
    like = layout_for(gradient, parameter, made)
    if in_place and like is gradient:
        return gradient.detach()
    return torch.empty_like(like, dtype=gradient.dtype, device=gradient.device, requires_grad=False)


def as_float32(result):
    """(d,) float32 memory for a sum in the order of elements, on the result's device: its own,
    where that can be, else None.
    """
    return result.view(-1) if result.dtype == torch.float32 and result.is_contiguous() else None


def may_exceed(dtype, largest):
    """Whether a float32 number may be NaN or Inf in ``dtype`` when no magnitude exceeds
    ``largest``, which may be NaN.
    """
    return not largest <= min(torch.finfo(dtype).max, _FLOAT32_MAX)


def is_finite(result):
    """Whether no element of a tensor on the host is NaN or Inf."""
    return bool(torch.isfinite(result).all())


def sparse_like(like, indices, values):
    """A sum in the layout of a parameter's own sparse gradient: whole slices of its dense
    dimensions.

    Args:
        like: the parameter's sparse gradient.
        indices: (n,) NumPy array of places in the dense tensor, distinct.
        values: (n,) float32 NumPy array.
    """
    flat, values = torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(np.array(values))
    sparse_shape = like.shape[: like.sparse_dim()]
    slice_size = int(torch.Size(like.shape[like.sparse_dim() :]).numel())
    rows, of_row = torch.unique(flat // slice_size, return_inverse=True)
    slices = torch.zeros(rows.numel() * slice_size, dtype=torch.float32)
    slices[of_row * slice_size + flat % slice_size] = values
    indices = torch.stack(torch.unravel_index(rows, sparse_shape))
    slices = slices.view(-1, *like.shape[like.sparse_dim() :]).to(like.dtype)
    return torch.sparse_coo_tensor(indices, slices, like.shape, is_coalesced=True).to(like.device)
