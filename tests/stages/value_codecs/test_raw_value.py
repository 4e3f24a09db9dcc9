"""Test RawValue: its bytes, and the sections that it refuses."""

import struct

import numpy as np
import pytest
from value_sections import LARGEST, assert_same_bits, random_floats, section_and_decoded

import deepreduce_hvd as dr
from deepreduce_hvd import container


def test_every_float_as_it_is():
    """Also -0, subnormals and the largest float, which sums could change."""
    values = np.append(random_floats(1000), np.array([0, -0.0, 1e-45, LARGEST], dtype=np.float32))
    section, decoded = section_and_decoded(dr.RawValue(), values)
    assert section == struct.pack(f"<{values.size}f", *values.tolist())
    assert_same_bits(decoded, values)


@pytest.mark.parametrize("size", [0, 11, 13, 16])
def test_other_lengths_are_refused(size):
    data = container.write(
        container.Payload(3, 3, value_id=dr.RawValue.stage_id, values=bytes(size))
    )
    with pytest.raises(dr.CorruptPayloadError, match="value section: expected"):
        dr.decode(data)
    with pytest.raises(dr.CorruptPayloadError, match=f"expected 12 bytes, got {size}"):
        dr.RawValue.decode(bytes(size), 3)
