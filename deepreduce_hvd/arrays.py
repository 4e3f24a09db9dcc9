"""What every public function asks of a NumPy array before the native core reads its memory."""

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError


def describe(array):
    """An argument as error messages show it: what keeps it from being taken is in there."""
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    remarks = [
        remark
        for remark, holds in (
            ("masked", isinstance(array, np.ma.MaskedArray)),
            ("another byte order than this machine's", not array.dtype.isnative),
            ("not contiguous", not array.flags.c_contiguous),
            ("read-only", not array.flags.writeable),
        )
        if holds
    ]
    kind = "a structured dtype" if array.dtype.fields else str(array.dtype)
    return ", ".join([f"{kind} of shape {array.shape}", *remarks])


def expect_array(name, array, dtypes, shape=None, contiguous=True, writable=False):
    """Raises InvalidArgumentError unless ``array`` is a 1-D NumPy array of one of ``dtypes``, a
    tuple.

    Args:
        name: what the message calls it.
        shape: the only one that is taken; any by default.
        contiguous, writable: whether its memory is handed over as it is, or written to.
    """
    good = (
        isinstance(array, np.ndarray)
        and not isinstance(array, np.ma.MaskedArray)
        and array.ndim == 1
        and any(array.dtype == dtype for dtype in dtypes)  # another byte order is another dtype
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
        )


def expect_apart(**arrays):
    """Raises InvalidArgumentError when arrays share memory: what is written to one would change
    another.
    """
    named = list(arrays.items())
    for position, (name, array) in enumerate(named):
        for other, one in named[:position]:
            if np.may_share_memory(array, one):
                raise InvalidArgumentError(
                    f"{name}: expected memory of its own, got that of {other}"
                )
