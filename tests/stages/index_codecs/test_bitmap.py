"""Test Bitmap: its size, and the sections that it refuses."""

import numpy as np
import pytest
from codecs_table import INDEX, LOSSLESS
from index_sections import assert_refused, index_section


@pytest.mark.parametrize("d", [3, 7, 8, 9, 16, 17, 1000])
def test_a_bit_per_element(d):
    """The size depends only on d. Bit i of the section is element i."""
    section = index_section("bitmap", np.array([d - 1], dtype=np.uint32), d)
    assert len(section) == -(-d // 8)
    assert int.from_bytes(section, "little") == 1 << (d - 1)


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (b"\x06", "expected .*bytes"),
        (b"\x06\0\0", "expected .*bytes"),
        (b"\x02\x04", "2 set bits below d = 10"),
        (b"\x06\x04", "2 set bits below d = 10"),
    ],
    ids=["short", "long", "bit beyond d", "one bit more, beyond d"],
)
def test_what_is_not_a_bitmap_is_refused(section, match):
    assert_refused("bitmap", section, 2, 10, match)


@pytest.mark.parametrize(
    ("density", "smallest"), [(0.01, "rice"), (0.3, "rice"), (0.45, "bitmap"), (0.9, "bitmap")]
)
def test_bitmap_is_the_smallest_above_two_fifths(density, smallest):
    d = 50_000
    indices = np.sort(np.random.default_rng(0).choice(d, int(density * d), replace=False)).astype(
        np.uint32
    )
    sizes = {name: len(INDEX[name].encode(indices, d, 0)[0]) for name in LOSSLESS}
    assert min(sizes, key=sizes.get) == smallest, sizes
