"""Encode and decode value sections with the native core and the NumPy classes, which must agree."""

import numpy as np
from hypothesis import strategies
from hypothesis.extra import numpy as numpy_strategies
from native_and_numpy import both

import deepreduce_hvd as dr
from deepreduce_hvd import container

LARGEST = np.finfo(np.float32).max


def section_and_decoded(value, values, **position):
    """Encode all ``values`` with the native core; return (value section, decoded values).

    Checks that they equal the oracle's. The section is None if it would be larger than the values,
    which are then sent unchanged.
    """
    values = np.asarray(values, dtype=np.float32)
    data, _ = both(
        dr.Codec(dr.NoneSparsifier(), value=value), dr.NoMemory(), values, (), **position
    )
    parts = container.read(data)
    # the sparse decoder returns the values themselves: a sum would change -0 to 0
    return parts.values if parts.value_id == value.stage_id else None, dr.decode_sum_sparse(
        [data], values.size
    )[1]


def decode_section(value, section, count):
    """Decode a given section with the native decoder; check that the oracle decodes it alike."""
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
    """Return random floats with all exponents equally likely, both signs, and subnormals."""
    bits = np.random.default_rng(5).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


FINITE = strategies.floats(width=32, allow_nan=False, allow_infinity=False)


ARRAYS = numpy_strategies.arrays(np.float32, strategies.integers(1, 300), elements=FINITE)
