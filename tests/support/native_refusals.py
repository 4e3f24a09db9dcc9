"""Give the native core parameters that the classes of stages refuse."""

import numpy as np
import pytest
from codecs_table import gradient

import deepreduce_hvd as dr
from deepreduce_hvd import _native


def assert_core_refuses(memory, at, numbers):
    """Check that the core refuses a codec, and leaves the state of its memory as it was.

    Args:
        memory: a memory.
        at, numbers: the fields of the codec from number ``at`` on are replaced by ``numbers``.
    """
    fields = dr.Codec(dr.TopK(0.1)).fields(memory)
    fields[at : at + len(numbers)] = numbers
    state = [gradient(100, key=3) for _ in memory.state]
    with pytest.raises(dr.InvalidArgumentError, match="expected.*got"):
        _native.encode(fields, gradient(100), 0, *state)
    for array in state:
        np.testing.assert_array_equal(array, gradient(100, key=3))
