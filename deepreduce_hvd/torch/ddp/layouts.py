"""The order of elements of gradients in DDP's buckets.

A bucket has a gradient in the order of its parameter's elements in memory, as it was when DDP was
called. The residual has the same order. If the order changes later, as with
``model.to(memory_format=torch.channels_last)``, elements would get the residuals of others. So this
is an error.
"""

import torch

from deepreduce_hvd.errors import InvalidArgumentError

#: gradients of a parameter that are looked at, if they are zero at first: a look waits for a GPU
_LOOKS = 5


class Layouts:
    """The order of elements of one model's gradients.

    Args:
        slots: slots of the parameters.
    """

    def __init__(self, slots):
        self._strides = {slot: _strides_of(slot.parameter) for slot in slots}
        #: slots for which nothing has shown yet which order their gradients have in buckets -> how
        #: many more gradients are looked at
        self._unknown = {slot: _LOOKS for slot in slots if len(_orders(slot.parameter)) > 1}

    def expect_known(self, slots, gradients):
        """Raise InvalidArgumentError if an element has another place than in the residual.

        Args:
            slots: slots of a bucket's parameters.
            gradients: their gradients in the bucket, as ``GradBucket.gradients()`` returns them.
        """
        for slot, gradient in zip(slots, gradients):
            if _strides_of(slot.parameter) != self._strides[slot]:
                raise _changed(slot)
            if self._unknown.get(slot):
                self._look_at(slot, gradient)

    def _look_at(self, slot, gradient):
        """Compare a gradient in a bucket with ``.grad``, from which DDP has copied it."""
        parameter = slot.parameter
        own = parameter.grad
        self._unknown[slot] -= 1
        if own is None or not bool(gradient.any()):
            return
        if own.data_ptr() == gradient.data_ptr():  # it is DDP's view of the bucket
            found = _strides_of(own) == _strides_of(in_layout_of(parameter, gradient))
        else:
            # no order fits if the program has changed .grad since
            expected, *others = (_in_order(gradient, order) for order in _orders(parameter))
            found = _equal(expected, own) or not any(_equal(other, own) for other in others)
        if not found:
            self._unknown[slot] = _LOOKS
            raise _changed(slot)
        self._unknown[slot] = 0


def in_layout_of(parameter, gradient):
    """Return a view of a gradient in DDP's bucket, with the strides of its parameter.

    DDP uses the strides of a parameter if it is dense in memory, and row-major order otherwise.
    ``GradBucket.gradients()`` shows all of them in row-major order.
    """
    return _in_order(gradient, _order_of(parameter))


def _order_of(parameter):
    """Return the strides of a parameter's gradient in DDP's bucket; None for row-major order."""
    is_row_major = parameter.is_contiguous() or not _fills_memory(parameter)
    return None if is_row_major else parameter.stride()


def _orders(parameter):
    """Return the strides that a gradient may have in a bucket, first those of its parameter now."""
    orders = [_order_of(parameter)]
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if orders[0] is not None:
        orders.append(None)
    elif channels_last is not None:
        like = torch.empty(parameter.shape, memory_format=channels_last, device="meta")
        if not like.is_contiguous():
            orders.append(like.stride())
    return orders


def _strides_of(tensor):
    """Return the strides of the dimensions that have several elements; others do not matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def _in_order(gradient, strides):
    return gradient if strides is None else gradient.as_strided(gradient.shape, strides)


def _equal(one, other):
    """Return whether two tensors have the same elements; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _fills_memory(tensor):
    """Return whether the elements of a tensor fill a range of memory without gaps or overlaps."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _changed(slot):
    return InvalidArgumentError(
        f"parameter {slot.name}: expected the memory format that it had when"
        f" DistributedDataParallel was called, got strides {tuple(slot.parameter.stride())}; call"
        " model.to(memory_format=...), or replace .data, before DistributedDataParallel"
    )
