"""Test value codecs at every SIMD level, and that senders know what receivers decode."""

import numpy as np
import pytest
from native_and_numpy import SIMD_LEVELS
from value_sections import assert_same_bits, random_floats, section_and_decoded

import deepreduce_hvd as dr
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

#: Value codecs with kernels for every SIMD level. With QSGD, sections end at every position within
#: a group of 8 codes.
VECTORISED = [
    dr.Float16(),
    dr.BFloat16(),
    *(
        dr.QSGD(bits=bits, bucket=bucket, norm=norm)
        for bits in range(1, 9)
        for bucket, norm in ((8, "max"), (64, "l2"), (512, "max"))
    ),
]


@pytest.mark.parametrize("value", VECTORISED, ids=repr)
def test_simd_levels_agree(value):
    """Every SIMD level equals the oracle, for all lengths around a vector and a bucket."""
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    # of moderate size, so that the sum of squares is finite; with subnormals and zeros
    values = np.ldexp(random_floats(1200), -1).astype(np.float32)
    values[::13] = 0
    for count in [*range(1, 70), 127, 128, 129, 511, 512, 513, 1000]:
        part = values[count : 2 * count] if count <= 500 else values[:count]
        expected, _ = encode_numpy(codec, dr.NoMemory(), part, (), 0.0, 1, 2, 3, 4, native=False)
        decoded = decode_sum_numpy([expected], np.zeros(count, dtype=np.float32), 1.0, native=False)
        for simd in SIMD_LEVELS:
            data, _ = encode_numpy(codec, dr.NoMemory(), part, (), 0.0, 1, 2, 3, 4, simd=simd)
            assert data.tobytes() == expected.tobytes(), f"SIMD level {simd}, {count} values"
            assert_same_bits(
                decode_sum_numpy([data], np.zeros(count, dtype=np.float32), 1.0, simd=simd), decoded
            )


@pytest.mark.parametrize(
    "value", [*VECTORISED, dr.Deflate(), dr.Quantile(), dr.Quantile(buckets=16)], ids=repr
)
def test_decoded_is_what_the_receiver_decodes(value):
    """Error feedback subtracts exactly the decoded payload, for floats with every exponent."""
    values = random_floats(30_000)
    section, decoded, _ = value.encode(values, key=3)
    assert_same_bits(type(value).decode(section, values.size), decoded)
    _, native = section_and_decoded(value, values)
    assert native.size == values.size
