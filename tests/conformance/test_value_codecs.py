"""Test every value codec at every SIMD level.

Float16, BFloat16 and Deflate are also compared with other implementations.
"""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from native_and_numpy import SIMD_LEVELS, both
from value_sections import (
    ARRAYS,
    LARGEST,
    assert_same_bits,
    decode_section,
    random_floats,
    section_and_decoded,
)

import deepreduce_hvd as dr
from deepreduce_hvd import container
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


# Float16 and BFloat16


def half_values(value, halves):
    """Return the values of uint16 patterns, from NumPy or torch."""
    if isinstance(value, dr.Float16):
        return halves.view(np.float16).astype(np.float32)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy()


def rounded_to_half(value, values):
    """Round to nearest even with NumPy or torch, saturated; return float32."""
    if isinstance(value, dr.Float16):
        return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    torch = pytest.importorskip("torch")
    largest = float(np.uint32(0x7F7F0000).view(np.float32))
    # torch rounds values above the largest to infinity
    return np.clip(torch.from_numpy(values).to(torch.bfloat16).float().numpy(), -largest, largest)


HALVES = [dr.Float16(), dr.BFloat16()]


def test_every_half_as_a_gradient():
    """float16 gradients widen exactly, subnormals included; NaN and Inf void the step."""
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    codec = dr.Codec(dr.NoneSparsifier())
    finite = halves[np.isfinite(halves)]
    data, _ = both(codec, dr.NoMemory(), finite, ())
    assert_same_bits(dr.decode_sum_sparse([data], finite.size)[1], finite.astype(np.float32))
    for bad in halves[~np.isfinite(halves)][::97]:
        assert np.isnan(dr.decode(codec.encode(np.array([1, bad], dtype=np.float16)))).all()


@pytest.mark.parametrize("value", HALVES)
def test_every_half(value):
    """All 65536 patterns: finite ones decode correctly and round-trip, others are refused."""
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    expected = half_values(value, halves)
    finite = np.isfinite(expected)
    halves, not_numbers = halves[finite], halves[~finite]
    assert_same_bits(decode_section(value, halves.tobytes(), halves.size), expected[finite])
    section, decoded = section_and_decoded(value, expected[finite])
    assert section == halves.tobytes()
    assert_same_bits(decoded, expected[finite])
    for pattern in not_numbers:
        data = container.write(
            container.Payload(2, 2, value_id=value.stage_id, values=struct.pack("<HH", 0, pattern))
        )
        with pytest.raises(dr.CorruptPayloadError, match="finite"):
            dr.decode(data)


@pytest.mark.parametrize("value", HALVES)
def test_every_tie_rounds_to_even(value):
    """Test the midpoint between any two adjacent 2-byte floats, and its float32 neighbors."""
    positive = half_values(
        value,
        np.arange(0x7C00 if isinstance(value, dr.Float16) else 0x7F80, dtype=np.uint32).astype(
            np.uint16
        ),
    )
    middles = ((positive[:-1].astype(np.float64) + positive[1:]) / 2).astype(np.float32)
    values = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(LARGEST))]
    )
    values = np.concatenate([values, -values])
    assert_same_bits(section_and_decoded(value, values)[1], rounded_to_half(value, values))


@pytest.mark.parametrize("value", HALVES)
def test_halves_of_any_float(value):
    values = random_floats(200_000)
    assert (np.abs(values) < np.finfo(np.float32).tiny).any(), "no subnormals among the floats"
    assert_same_bits(section_and_decoded(value, values)[1], rounded_to_half(value, values))


@pytest.mark.parametrize(
    ("value", "largest"), [(dr.Float16(), 65504.0), (dr.BFloat16(), 3.3895313892515355e38)]
)
def test_halves_saturate(value, largest):
    values = np.array(
        [largest, np.nextafter(np.float32(largest), np.float32(LARGEST)), LARGEST, -LARGEST],
        dtype=np.float32,
    )
    assert_same_bits(section_and_decoded(value, values)[1], [largest, largest, largest, -largest])


def test_rounding_of_halves_stays_in_the_residual():
    values = gradient(1000)
    for value in HALVES:
        residual = np.zeros_like(values)
        data = dr.Codec(dr.NoneSparsifier(), value=value).encode(values, residual)
        np.testing.assert_array_equal(dr.decode(data) + residual, values)
        assert residual.any()


# Deflate


@settings(max_examples=100, deadline=None)
@given(
    ARRAYS,
    strategies.integers(1, 9),
    strategies.booleans(),
    strategies.sampled_from(["rle", "default"]),
)
def test_deflate_is_lossless(values, level, shuffle, strategy):
    _, decoded = section_and_decoded(
        dr.Deflate(level=level, shuffle=shuffle, strategy=strategy), values
    )
    assert_same_bits(decoded, values)


@pytest.mark.parametrize(
    "arguments", [{"level": 0}, {"level": 10}, {"shuffle": 2}, {"strategy": "fixed"}]
)
def test_deflate_refuses(arguments):
    with pytest.raises(dr.InvalidArgumentError, match=f"Deflate {next(iter(arguments))}: expected"):
        dr.Deflate(**arguments)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [65535, 65536, 65537, 131072])
def test_deflate_block_boundaries(count, shuffle):
    values = np.round(gradient(count) * 1000).astype(np.float32)
    section, decoded = section_and_decoded(dr.Deflate(shuffle=shuffle), values)
    assert_same_bits(decoded, values)
    lengths = struct.unpack_from(f"<{-(-count // 65536) - 1}I", section, 1)
    assert len(section) > 1 + 4 * len(lengths) + sum(lengths)


def test_deflate_is_smaller_than_raw():
    """Values selected by top-k have few exponents. The shuffle groups these bytes for zlib."""
    values = np.random.default_rng(4).standard_normal(1_000_000, dtype=np.float32)
    selected = values[dr.TopK(0.01).select(values, key=0)]
    sections = {
        name: section_and_decoded(value, selected)[0]
        for name, value in {
            "runs": dr.Deflate(),
            "best": dr.Deflate(level=9, strategy="default"),
            "plain": dr.Deflate(level=9, shuffle=False),
        }.items()
    }
    raw = 4 * selected.size
    sizes = {name: raw if section is None else len(section) for name, section in sections.items()}
    assert sizes["runs"] < 0.9 * raw
    assert sizes["runs"] < sizes["best"] < sizes["plain"]
