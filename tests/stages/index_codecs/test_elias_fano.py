"""Test EliasFano: its bytes, its size, and the sections that it refuses."""

import math

import numpy as np
import pytest
from index_sections import assert_refused, index_section

import deepreduce_hvd as dr


def test_low_bits_then_a_bitmap_of_the_high_bits():
    """A section computed by hand. w = floor(log2(16 / 4)) = 2."""
    section = index_section("elias_fano", np.array([1, 6, 7, 15], dtype=np.uint32), 16)
    # the low bits 1, 2, 3, 3; the high bits 0, 1, 1, 3 set the bits 0, 2, 3 and 6
    assert section == bytes([0b11_11_10_01, 0b0100_1101])


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (bytes([0b11_11_10_01]), "expected .*bytes"),
        (bytes([0b11_11_10_01, 0b0100_1101, 0]), "expected .*bytes"),
        (bytes([0b11_10_11_01, 0b0100_1101]), "ascending"),
        (bytes([0b11_10_10_01, 0b0100_1101]), "ascending"),
    ],
    ids=["short", "long", "7 before 6", "6 twice"],
)
def test_what_is_not_four_ascending_indices_is_refused(section, match):
    assert_refused("elias_fano", section, 4, 16, match)


@pytest.mark.parametrize("count", [1, 2, 3, 368, 4095, 18432, 36863])
def test_elias_fano_size(count):
    d = 36_864
    indices = np.sort(np.random.default_rng(count).choice(d, count, replace=False)).astype(
        np.uint32
    )
    section, _, _ = dr.EliasFano().encode(indices, d, key=0)
    # two sections of bits, each rounded up to bytes, and the closing bit
    assert 8 * len(section) <= count * (2 + math.log2(d / count)) + 16
