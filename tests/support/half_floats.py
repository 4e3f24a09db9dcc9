"""Compare Float16 and BFloat16 with other implementations, for all numbers of two bytes."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from value_sections import (
    LARGEST,
    assert_same_bits,
    decode_section,
    random_floats,
    section_and_decoded,
)

import deepreduce_hvd as dr
from deepreduce_hvd import container


def check_every_pattern(value, to_float32):
    """All 65536 patterns: finite ones decode correctly and round-trip, others are refused."""
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    expected = to_float32(halves)
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


def check_every_tie(value, to_float32, rounded, infinity):
    """Test the midpoint between any two adjacent 2-byte floats, and its float32 neighbors.

    Args:
        value: the codec.
        to_float32, rounded: the other implementation, of its decoder and of its encoder.
        infinity: the pattern of infinity; those below it are the positive finite numbers.
    """
    positive = to_float32(np.arange(infinity, dtype=np.uint32).astype(np.uint16))
    middles = ((positive[:-1].astype(np.float64) + positive[1:]) / 2).astype(np.float32)
    values = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(LARGEST))]
    )
    values = np.concatenate([values, -values])
    assert_same_bits(section_and_decoded(value, values)[1], rounded(values))


def check_any_float(value, rounded):
    values = random_floats(200_000)
    assert (np.abs(values) < np.finfo(np.float32).tiny).any(), "no subnormals among the floats"
    assert_same_bits(section_and_decoded(value, values)[1], rounded(values))


def check_saturation(value, largest):
    values = np.array(
        [largest, np.nextafter(np.float32(largest), np.float32(LARGEST)), LARGEST, -LARGEST],
        dtype=np.float32,
    )
    assert_same_bits(section_and_decoded(value, values)[1], [largest, largest, largest, -largest])


def check_residual(value):
    """What rounding leaves is in the residual."""
    values = gradient(1000)
    residual = np.zeros_like(values)
    data = dr.Codec(dr.NoneSparsifier(), value=value).encode(values, residual)
    np.testing.assert_array_equal(dr.decode(data) + residual, values)
    assert residual.any()
