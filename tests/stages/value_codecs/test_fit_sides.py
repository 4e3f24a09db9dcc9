"""Test what FitPoly and FitDExp share: a curve for each sign, and values that are sorted.

Either the order section has their positions, or the indices follow their values.
"""

import numpy as np
import pytest
from codecs_table import gradient
from fitted_values import FITS, heavy_tailed, native_and_oracle, relative_error
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as numpy_strategies

import deepreduce_hvd as dr
from deepreduce_hvd import container, reference
from deepreduce_hvd.numerics import bits
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy


@settings(max_examples=150, deadline=None)
@given(
    numpy_strategies.arrays(
        np.float32,
        strategies.integers(0, 200),
        elements=strategies.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    strategies.sampled_from(FITS),
)
def test_any_finite_values(values, value):
    """For any floats both implementations agree; decoded values are finite, with the same sign."""
    _, decoded = native_and_oracle(value, values)
    assert np.isfinite(decoded).all()
    assert not (np.signbit(decoded) != np.signbit(values))[(decoded != 0) & (values != 0)].any()


@pytest.mark.parametrize("simd", [0, 1, 2])
@pytest.mark.parametrize("value", FITS, ids=repr)
@pytest.mark.parametrize("name", ["laplace", "lognormal"])
def test_large_inputs_agree_at_every_simd_level(name, value, simd):
    values = heavy_tailed(name, 30011)
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    native, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4, simd=simd)
    oracle, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4, native=False)
    assert native.tobytes() == oracle.tobytes()
    decoded = decode_sum_numpy([native], np.zeros(values.size, dtype=np.float32), 1.0, simd=simd)
    np.testing.assert_array_equal(
        decoded,
        decode_sum_numpy([native], np.zeros(values.size, dtype=np.float32), 1.0, native=False),
    )


@pytest.mark.parametrize("value", FITS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_sign_only(sign, count, value):
    """All-positive and all-negative inputs crash published code."""
    values = np.float32(sign) * (np.abs(gradient(count)) + np.float32(0.5))
    _, decoded = native_and_oracle(value, values)
    assert (np.sign(decoded) == sign).all()
    if count:
        assert relative_error(decoded, values) < 0.5


@pytest.mark.parametrize("n", range(5, 13))
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_order_width_at_powers_of_two(n, off):
    """ceil(log2 k) bits per entry hold 0 … k - 1. log2(k - 1) rounded down is one bit too few."""
    count = 2**n + off
    values = gradient(count)
    data, decoded = native_and_oracle(dr.FitPoly(segments=1), values)
    width = n if off <= 0 else n + 1
    parts = container.read(data)
    assert parts.order == container.PERMUTATION
    assert len(parts.order_map) == (count * width + 7) // 8
    order = bits.unpack_fields(parts.order_map, count, width)
    assert sorted(order.tolist()) == list(range(count))
    positives = values[order[: int((values >= 0).sum())]]
    assert (np.diff(positives) <= 2.0**-18 * positives[:-1]).all()
    assert relative_error(decoded, values) < 0.2


@pytest.mark.parametrize("value", FITS, ids=repr)
def test_values_find_their_indices_in_both_mode(value):
    """Published code keeps values in the order of the sparsifier, but decodes ascending indices.

    This gives a relative error of 1.41.
    """
    dense = gradient(20000)
    free = dr.Codec(dr.TopK(0.02), index=dr.RawIndex(), value=value).encode(dense)
    everything = np.zeros(20000, dtype=np.float32)
    everything[reference.decode_sparse(free)[0]] = dense[reference.decode_sparse(free)[0]]
    assert (
        dr.inspect(free)["order"] == "indices in value order"
        and dr.inspect(free)["order_bytes"] == 0
    )
    mapped = dr.Codec(dr.TopK(0.02), index=dr.Rice(), value=value).encode(dense)
    assert dr.inspect(mapped)["order"] == "permutation" and dr.inspect(mapped)["order_bytes"] == 450
    np.testing.assert_array_equal(dr.decode(free), dr.decode(mapped))
    assert relative_error(dr.decode(mapped), everything) < 0.06


@pytest.mark.parametrize("change", ["repeat", "beyond", "short", "long", "padding"])
def test_order_section_must_be_a_permutation(change):
    values = gradient(37)
    parts = container.read(native_and_oracle(dr.FitPoly(segments=1), values)[0])
    order = bits.unpack_fields(parts.order_map, 37, 6)
    if change == "repeat":
        order[3] = order[30]
    if change == "beyond":
        order[36] = 37
    parts.order_map = bits.pack_fields(order, 6)
    if change == "padding":
        parts.order_map = parts.order_map[:-1] + bytes([parts.order_map[-1] | 0x80])
    parts.order_map = {"short": parts.order_map[:-1], "long": parts.order_map + b"\0"}.get(
        change, parts.order_map
    )
    hostile = container.write(parts)
    for native in (True, False):
        with pytest.raises(dr.CorruptPayloadError, match="order section"):
            decode_sum_numpy([hostile], np.zeros(37, dtype=np.float32), 1.0, native=native)
