"""Test RLE: its bytes, and the sections that it refuses."""

import numpy as np
import pytest
from index_sections import assert_refused, index_section


@pytest.mark.parametrize(
    ("indices", "section"),
    [
        ([0, 1, 2, 5], [0, 3 - 1, 2 - 1, 1 - 1]),
        ([3], [3, 1 - 1]),
        ([9], [9, 1 - 1]),
        ([0, 9], [0, 1 - 1, 8 - 1, 1 - 1]),
    ],
)
def test_pairs_of_runs(indices, section):
    """Only the first number is not one less than its run. What follows the last run is not sent."""
    assert index_section("rle", np.array(indices, dtype=np.uint32), 10) == bytes(section)


@pytest.mark.parametrize(
    ("unset", "run", "size"),
    [(127, 128, 2), (128, 128, 3), (127, 129, 3), (16383, 16384, 4), (16384, 16385, 6)],
)
def test_seven_bits_of_a_run_to_a_byte(unset, run, size):
    indices = np.arange(unset, unset + run, dtype=np.uint32)
    assert len(index_section("rle", indices, unset + run + 5)) == size


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ([1, 1, 0], "index section: expected"),
        ([1, 0], "runs of 2 set bits"),
        ([1, 2], "runs of 2 set bits"),
        ([9, 1], "within d = 10"),
        ([9, 0, 0, 0], "within d = 10"),
        ([0x81, 0, 1], "no longer than needed"),
        ([1, 0x81], "index section: expected"),
    ],
    ids=["odd", "one bit", "three bits", "beyond d", "second beyond d", "long number", "cut"],
)
def test_what_is_not_two_set_bits_is_refused(section, match):
    assert_refused("rle", bytes(section), 2, 10, match)
