"""Test Rice: its bytes, its parameter, its blocks, and the sections that it refuses."""

import numpy as np
import pytest
from index_sections import assert_refused, index_section


def test_unary_quotients():
    """A section computed by hand. The gaps 0, 4, 0 take 7 bits with b = 0, and 8 with b = 1."""
    section = index_section("rice", np.array([0, 5, 6], dtype=np.uint32), 8)
    assert section == bytes([0, 0b0110_0001])


def test_the_smaller_parameter_wins_a_tie():
    """A gap of 5 takes 4 bits with b = 1, 2 and 3."""
    indices = np.arange(5, 6000, 6, dtype=np.uint32)
    section = index_section("rice", indices, 6000)
    assert section[0] == 1
    # the parameter, 1000 low bits, and 1000 quotients of 2
    assert len(section) == 1 + 1000 // 8 + 3 * 1000 // 8


def two_blocks():
    """Return the indices of a full block and of one more, and their section."""
    indices = np.append(np.arange(4096, dtype=np.uint32), np.uint32(4100))
    return indices, index_section("rice", indices, 5000)


def test_the_directory_has_an_entry_for_the_second_block():
    _, section = two_blocks()
    assert section[0] == 0
    # the second block can start at index 4096, and its data at byte 4096 / 8
    assert section[2:10] == (4096).to_bytes(4, "little") + (512).to_bytes(4, "little")
    # one gap of 4: with b = 1 or 2 two bytes, of which the first has the low bits
    assert len(section) == 2 + 8 + 512 + 2


@pytest.mark.parametrize("change", [-1, 1, 8])
@pytest.mark.parametrize("entry", [2, 6], ids=["index", "offset"])
def test_a_directory_that_contradicts_the_data_is_refused(entry, change):
    indices, section = two_blocks()
    number = int.from_bytes(section[entry : entry + 4], "little") + change
    changed = section[:entry] + number.to_bytes(4, "little") + section[entry + 4 :]
    assert_refused("rice", changed, indices.size, 5000, "index section: expected")


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (bytes([32, 0b0110_0001]), "Rice parameter of at most 31, got 32"),
        (bytes([0, 0b0110_0001, 0]), "unary codes"),
        (bytes([1, 0b0000_1000, 0b0001_1001]), "index section: expected"),
    ],
    ids=["parameter", "a byte too many", "padding of the low bits"],
)
def test_what_is_not_three_indices_is_refused(section, match):
    assert_refused("rice", section, 3, 8, match)
