"""Value sections through the native core and the NumPy classes, which must agree."""

import numpy as np
from hypothesis import strategies
from hypothesis.extra import numpy as numpy_strategies
from native_and_numpy import both

import deepreduce_hvd as dr
from deepreduce_hvd import container

LARGEST = np.finfo(np.float32).max


def section_and_decoded(value, values, **position):
    """All of ``values`` through the native core, asserted equal to the oracle -> (value section,
    decoded values).

    The section is None when it would be larger than the values, which are then sent as they are.
    """
    values = np.asarray(values, dtype=np.float32)
    data, _ = both(
        dr.Codec(dr.NoneSparsifier(), value=value), dr.NoMemory(), values, (), **position
    )
    parts = container.read(data)
    # the sparse decoder hands out the values themselves: a sum would turn -0 into 0
    return parts.values if parts.value_id == value.stage_id else None, dr.decode_sum_sparse(
        [data], values.size
    )[1]


def decode_section(value, section, count):
    """A section made by hand through the native decoder, asserted to be decoded alike by the
    oracle.
    """
    data = container.write(container.Payload(count, count, value_id=value.stage_id, values=section))
    native = dr.decode_sum_sparse([data], count)[1]
    np.testing.assert_array_equal(
        native.view(np.uint32), type(value).decode(section, count).view(np.uint32)
    )
    return native


def assert_same_bits(got, expected):
    np.testing.assert_array_equal(
        got.view(np.uint32), np.asarray(expected, dtype=np.float32).view(np.uint32)
    )


def random_floats(count):
    """Every exponent alike, both signs, subnormals included."""
    bits = np.random.default_rng(5).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


FINITE = strategies.floats(width=32, allow_nan=False, allow_infinity=False)


ARRAYS = numpy_strategies.arrays(np.float32, strategies.integers(1, 300), elements=FINITE)
