"""Float16, BFloat16, Deflate, QSGD and Quantile against other implementations and against what
their papers promise.
"""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as numpy_strategies
from test_conformance import SIMD_LEVELS, both

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy
from deepreduce_hvd.stages.value_codecs import quantile

LARGEST = np.finfo(np.float32).max
FINITE = strategies.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = numpy_strategies.arrays(np.float32, strategies.integers(1, 300), elements=FINITE)


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


# All of them


#: a value codec with kernels for every SIMD level; QSGD's groups of 8 codes meet the section's end
#: in every way
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
    """Bytes and decoded values are those of the oracle at every SIMD level, for every length around
    a vector and a bucket.
    """
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    # of moderate size, so that a sum of squares is finite, with subnormals and zeros among them
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
    """What error feedback subtracts is, bit for bit, what the payload decodes to, for floats of
    every exponent.
    """
    values = random_floats(30_000)
    section, decoded, _ = value.encode(values, key=3)
    assert_same_bits(type(value).decode(section, values.size), decoded)
    _, native = section_and_decoded(value, values)
    assert native.size == values.size


# Float16 and BFloat16


def half_values(value, halves):
    """What uint16 patterns mean, by NumPy or torch."""
    if isinstance(value, dr.Float16):
        return halves.view(np.float16).astype(np.float32)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy()


def rounded_to_half(value, values):
    """Nearest, ties to even, by NumPy or torch, saturated; as float32."""
    if isinstance(value, dr.Float16):
        return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    torch = pytest.importorskip("torch")
    largest = float(np.uint32(0x7F7F0000).view(np.float32))
    # torch rounds to infinity what lies beyond the largest
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
    """All 65536 patterns: the finite ones mean what they mean elsewhere and come back as
    themselves, the others are refused.
    """
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
    """The middle between any two halves and its two neighbours in float32."""
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


# QSGD


def norms_of(values, bucket, norm):
    groups = [values[at : at + bucket].astype(np.float64) for at in range(0, values.size, bucket)]
    norms = [
        np.abs(group).max() if norm == "max" else np.sqrt((group**2).sum()) for group in groups
    ]
    return np.repeat(norms, [group.size for group in groups])


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_qsgd_is_unbiased(bits, norm):
    """The mean over many keys is the value, within the standard error of that mean, for every
    value.
    """
    values = gradient(200)
    codec = dr.Codec(dr.NoneSparsifier(), value=dr.QSGD(bits=bits, bucket=64, norm=norm))
    draws = 2000
    total = np.zeros(values.size)
    for step in range(draws):
        total += dr.decode(codec.encode(values, step=step))
    norms = norms_of(values, 64, norm)
    interval = 2 * norms if bits == 1 else norms / (2 ** (bits - 1) - 1)
    # a draw is the lower or the upper end of its interval
    upper = (values + norms) / interval if bits == 1 else np.abs(values) / interval
    upper = upper - np.floor(upper)
    # what happens a few times in all draws is not normally distributed
    error = interval * np.sqrt(np.maximum(upper * (1 - upper), 10 / draws) / draws)
    deviations = (total / draws - values) / error
    assert np.abs(deviations).max() < 4.5
    assert 0.3 < np.sqrt((deviations**2).mean()) < 1.3, (
        "the draws vary less or more than they should"
    )


@settings(max_examples=100, deadline=None)
@given(
    ARRAYS,
    strategies.integers(1, 8),
    strategies.sampled_from(["max", "l2"]),
    strategies.sampled_from([8, 64, 512]),
)
def test_qsgd_error_bound(values, bits, norm, bucket):
    """No value is off by more than one level, whatever the floats, and none changes its sign (which
    one bit cannot promise).
    """
    _, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=bucket, norm=norm), values)
    assert np.isfinite(decoded).all()
    norms = np.minimum(norms_of(values, bucket, norm), LARGEST)
    interval = 2 * norms if bits == 1 else norms / (2 ** (bits - 1) - 1)
    # rounded to float32 a few times, subnormals to their spacing
    assert (np.abs(decoded.astype(np.float64) - values) <= interval * (1 + 1e-5) + 1e-44).all()
    assert bits == 1 or (decoded * values.astype(np.float64) >= 0).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_qsgd_of_zeros(bits, norm):
    """A bucket of norm 0 between others: zeros, not NaN."""
    values = gradient(48)
    values[16:32] = 0
    section, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=16, norm=norm), values)
    assert np.isfinite(decoded).all()
    assert not decoded[16:32].any()
    assert struct.unpack_from("<3f", section, 3)[1] == 0


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("scale", [LARGEST, np.float32(1e-45), np.float32(1e-38)])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_qsgd_of_extremes(bits, scale, norm):
    """The largest floats, whose sum of squares is beyond float32, and subnormals, whose squares are
    below it.
    """
    values = np.where(np.arange(600) % 2, scale, -scale).astype(np.float32)
    _, decoded = section_and_decoded(dr.QSGD(bits=bits, bucket=512, norm=norm), values)
    assert np.isfinite(decoded).all()
    if norm == "max":
        np.testing.assert_array_equal(decoded, values)


def test_qsgd_size():
    """bits per value and a norm per bucket, as promised to the planner."""
    for bits in range(1, 9):
        value = dr.QSGD(bits=bits, bucket=512)
        section, _ = section_and_decoded(value, gradient(5120))
        assert (
            len(section) == 3 + 10 * 4 + 5120 * bits // 8 == 3 + 5120 * value.bits_per_value() / 8
        )


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
    """What Top-k selects has few exponents; the shuffle makes that visible to zlib, which finds
    nothing but runs and frequencies.
    """
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


# Quantile


def sides_of(values, wanted):
    """[(the sorted values of a side, its number of buckets)] for negative values and others, those
    that exist.
    """
    sides = [np.sort(values[values < 0]), np.sort(values[values >= 0])]
    buckets = quantile._buckets_of_sides(values.size, sides[0].size, wanted)
    return [(side, n) for side, n in zip(sides, buckets) if n]


@pytest.mark.parametrize("case", ["both", "positive", "negative", "lopsided", "normal"])
@pytest.mark.parametrize("buckets", [2, 3, 16, 256])
def test_means_lie_within_their_quantiles(buckets, case):
    values = {
        "both": gradient(5000),
        "positive": np.abs(gradient(5000)),
        "negative": -np.abs(gradient(5000)),
        "lopsided": np.where(np.arange(5000) == 17, np.float32(-1), np.abs(gradient(5000))),
        "normal": np.random.default_rng(2).standard_normal(5000).astype(np.float32),
    }[case]
    section, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
    negatives, others = struct.unpack_from("<HH", section)
    assert max(negatives, 1) + max(others, 1) >= 2 and negatives + others <= buckets
    means = np.frombuffer(section, dtype="<f4", count=negatives + others, offset=5)
    assert np.isin(decoded, means).all()
    at = 0
    for side, n in sides_of(values, buckets):
        levels = np.arange(n + 1) / n
        low = np.quantile(side, levels[:-1], method="lower")
        high = np.quantile(side, levels[1:], method="higher")
        assert (low <= means[at : at + n]).all() and (means[at : at + n] <= high).all()
        at += n
    assert at == means.size
    assert abs((decoded.astype(np.float64) - values).sum()) < 1e-6 * np.abs(values).sum(), (
        "buckets keep their sums"
    )


@settings(max_examples=150, deadline=None)
@given(ARRAYS, strategies.integers(2, 256))
def test_quantile_of_any_floats(values, buckets):
    """Finite, of the same sign, and in the same order as the values."""
    _, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
    assert np.isfinite(decoded).all()
    assert (decoded[values < 0] <= 0).all() and (decoded[values > 0] >= 0).all()
    assert (np.diff(decoded[np.argsort(values, kind="stable")]) >= 0).all()


def test_quantile_sorts_like_numpy():
    """Ranks are those of a stable sort, with ties across bucket boundaries, both zeros among the
    positive values.
    """
    for values in (
        random_floats(20_000),
        np.round(gradient(20_000) * 4).astype(np.float32),
        np.where(np.arange(3000) % 2, np.float32(-0.0), np.float32(0)),
        np.where(np.arange(3000) % 3, np.float32(-0.0), gradient(3000)),
        np.full(3000, -0.0, dtype=np.float32),
    ):
        for buckets in (2, 7, 256):
            section, decoded = section_and_decoded(dr.Quantile(buckets=buckets), values)
            assert section is not None
            assert ((decoded < 0) <= (values < 0)).all() and ((decoded > 0) <= (values >= 0)).all()


@pytest.mark.parametrize(
    "values",
    [
        [3.5],
        [-3.5],
        [1, -1],
        [0.25] * 1000,
        [-0.25] * 999,
        [0.25] * 500 + [-4] * 500,
        [0, 0, 0, -1],
    ],
)
def test_few_distinct_values_are_exact(values):
    section, decoded = section_and_decoded(dr.Quantile(), values)
    np.testing.assert_array_equal(decoded, np.asarray(values, dtype=np.float32))
    assert section is not None or len(values) < 8


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8193])
def test_quantile_huffman_block_boundaries(count):
    """One bucket for the few negative values and one for the rest makes the Huffman code the
    shorter kind.
    """
    values = np.where(np.arange(count) % 500 == 0, np.float32(-1), np.abs(gradient(count)))
    section, decoded = section_and_decoded(dr.Quantile(buckets=6), values)
    assert section[4] == 1, "expected Huffman coded buckets"
    assert ((decoded < 0) == (values < 0)).all()


def test_sketchml_instance():
    """SKCompress: delta indices in a Huffman code and quantile buckets; lossless indices, values
    within their buckets.
    """
    values = gradient(1_000_000)
    codec = dr.Codec(dr.TopK(0.01), index=dr.Huffman(delta=True), value=dr.Quantile())
    residual = np.zeros_like(values)
    data, (residual,) = both(codec, dr.Residual(), values, (residual,))
    indices, decoded = dr.decode_sum_sparse([data], values.size)
    np.testing.assert_array_equal(indices, dr.TopK(0.01).select(values, key=0))
    selected = values[indices]
    assert np.linalg.norm(decoded - selected) < 0.005 * np.linalg.norm(selected)
    np.testing.assert_allclose(dr.decode(data) + residual, values, rtol=0, atol=1e-7)
    # 8 bits for the bucket, 10 for the gap, and two tables
    assert data.size * 8 / indices.size < 20
