"""NumPy arrays for the native core: checks before it reads their memory, and large ones."""

import mmap

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


_HUGE_PAGE = 2 << 20  # bytes


def zeros_on_huge_pages(d):
    """Return (d,) float32 zeros, in large pages of memory where Linux offers them.

    For residuals: the core reads and writes them in each step, in part at random places, and with
    larger pages the processor looks up fewer addresses of pages. Pages are allocated at the first
    write.

    Args:
        d: number of elements.
    """
    size = 4 * d
    if size < 2 * _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(d, dtype=np.float32)
    # one page more than needed, of which no memory is used, to begin at a multiple of a page
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % _HUGE_PAGE
    try:  # the rest, less than a large page, stays in small ones
        memory.madvise(mmap.MADV_HUGEPAGE, offset, size // _HUGE_PAGE * _HUGE_PAGE)
    except OSError:  # a kernel without them
        return np.zeros(d, dtype=np.float32)
    return np.frombuffer(memory, np.float32, d, offset)
