"""Checks of NumPy arrays before the native core reads their memory."""

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError


def describe(array):
    """Return a description of an argument for error messages.

    It includes everything that can make an array unusable.
    """
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    remarks = [
        remark
        for remark, holds in (
            ("masked", isinstance(array, np.ma.MaskedArray)),
            ("not in native byte order", not array.dtype.isnative),
            ("not contiguous", not array.flags.c_contiguous),
            ("read-only", not array.flags.writeable),
        )
        if holds
    ]
    kind = "a structured dtype" if array.dtype.fields else str(array.dtype)
    return ", ".join([f"{kind} of shape {array.shape}", *remarks])


def from_bytes(value):
    """Return what to write for the bytes of a payload, to append to a message; else ""."""
    given = isinstance(value, (bytes, bytearray, memoryview))
    return "; for bytes write np.frombuffer(data, np.uint8)" if given else ""


def expect_array(name, array, dtypes, shape=None, contiguous=True, writable=False):
    """Raise InvalidArgumentError unless ``array`` is a usable 1-D NumPy array.

    Args:
        name: the name of the argument, for the error message.
        array: the array to check.
        dtypes: a tuple of the dtypes to accept.
        shape: the only shape to accept; None accepts any.
        contiguous: whether the array must be contiguous.
        writable: whether the array must be writable.
    """
    good = (
        isinstance(array, np.ndarray)
        and not isinstance(array, np.ma.MaskedArray)
        and array.ndim == 1
        # dtypes that differ in byte order are not equal
        and array.dtype in dtypes
        and (shape is None or array.shape == shape)
        and (array.flags.c_contiguous or not contiguous)
        and (array.flags.writeable or not writable)
    )
    if not good:
        manner = "writable " * writable + "contiguous " * contiguous
        of = ", ".join(np.dtype(dtype).name for dtype in dtypes)
        of_shape = "" if shape is None else f" of shape {shape}"
        raise InvalidArgumentError(
            f"{name}: expected a {manner}1-D {of} array{of_shape}, got {describe(array)}"
            f"{from_bytes(array) if np.uint8 in dtypes else ''}"
        )


def expect_finite(name, all_finite):
    """Raise InvalidArgumentError unless ``all_finite``, of the array with this name, is true."""
    if not all_finite:
        raise InvalidArgumentError(f"{name}: expected finite numbers, got NaN or Inf")


def expect_apart(**arrays):
    """Raise InvalidArgumentError if any arrays share memory.

    Writing to one of them would change another.
    """
    named = list(arrays.items())
    for position, (name, array) in enumerate(named):
        for other, one in named[:position]:
            if np.may_share_memory(array, one):
                raise InvalidArgumentError(
                    f"{name}: expected separate memory, got memory shared with {other}"
                )
