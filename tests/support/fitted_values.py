"""Run the curve-fitting value codecs on all values of an array, and measure their errors."""

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

FITS = [
    dr.FitPoly(),
    dr.FitPoly(degree=1),
    dr.FitPoly(degree=7),
    dr.FitPoly(segments=3),
    dr.FitDExp(),
]


def relative_error(decoded, values):
    return np.linalg.norm(decoded.astype(np.float64) - values) / np.linalg.norm(
        values.astype(np.float64)
    )


def native_and_oracle(value, values):
    """Return the payload of all ``values`` and its decoded values.

    Checks that both equal the results of the oracle.
    """
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    native, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4)
    oracle, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4, native=False)
    assert native.tobytes() == oracle.tobytes()
    decoded = dr.decode(native)
    from_oracle = decode_sum_numpy(
        [native], np.zeros(values.size, dtype=np.float32), 1.0, native=False
    )
    np.testing.assert_array_equal(decoded.view(np.uint32), from_oracle.view(np.uint32))
    return native, decoded
