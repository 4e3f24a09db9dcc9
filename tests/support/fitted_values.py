"""Run the curve-fitting value codecs on all values of an array, and measure their errors."""

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

FITS = [
    dr.FitPoly(),
    dr.FitPoly(degree=1),
    dr.FitPoly(degree=7),
    dr.FitPoly(segments=3),
    dr.FitDExp(),
]


def heavy_tailed(name, count, seed=0):
    """Return the largest 1 % of ``100 count`` samples, (count,) float32."""
    random = np.random.default_rng(seed)
    samples = {
        "laplace": lambda n: random.laplace(size=n),
        "student": lambda n: random.standard_t(3, n),
        "normal": lambda n: random.standard_normal(n),
        "lognormal": lambda n: np.exp(2 * random.standard_normal(n)) * random.choice([-1, 1], n),
    }[name](100 * count)
    largest = np.argpartition(np.abs(samples), samples.size - count)[samples.size - count :]
    return (1e-3 * samples[np.sort(largest)]).astype(np.float32)


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


def hostile_values(values, section):
    """Return a payload with the shape of ``values`` and another value section."""
    parts = container.read(dr.Codec(dr.NoneSparsifier(), value=values[1]).encode(values[0]))
    parts.values = section(parts.values)
    data = container.write(parts)
    results = [
        decode_sum_numpy([data], np.zeros(values[0].size, dtype=np.float32), 1.0, native=native)
        for native in (True, False)
    ]
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
    return results[0]
