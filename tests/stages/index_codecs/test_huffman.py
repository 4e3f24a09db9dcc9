"""Test Huffman: both kinds of its code, and the sections that it refuses."""

import numpy as np
import pytest
from index_sections import assert_refused, index_section

from deepreduce_hvd.numerics import huffman_code


def test_the_static_code_of_256_elements():
    """Three of the four bytes of each index are 0, so that the code of 0 has one bit.

    The other 255 symbols are equally frequent. They have nine bits, and one of them eight.
    """
    indices = np.array([0, 7, 50, 100, 101, 150, 200, 255], dtype=np.uint32)
    section = index_section("huffman", indices, 256)
    assert section[0] == 0
    assert len(section) == 1 + -(-(4 * 1 + 7 * (3 * 1 + 9)) // 8)


@pytest.mark.parametrize(("name", "entry"), [("huffman", 4), ("huffman_delta", 8)])
def test_each_block_but_the_first_has_an_entry(name, entry):
    """All gaps are 0, so that one block of gaps is 4096 codes of one bit."""
    indices = np.arange(8193, dtype=np.uint32)
    section = index_section(name, indices, 9000)
    head = 1 + (128 if name == "huffman_delta" else 0)
    starts = [
        int.from_bytes(section[at + entry - 4 : at + entry], "little")
        for at in (head, head + entry)
    ]
    assert 0 < starts[0] < starts[1] < len(section) - head - 2 * entry
    if name == "huffman_delta":
        assert starts == [512, 1024] and len(section) == head + 2 * entry + 1024 + 1


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("huffman", lambda section: b"\2" + section[1:], "kind 0 or 1"),
        ("huffman", lambda section: section + b"\0", "index section: expected"),
        ("huffman_delta", lambda section: section[:128], "expected .*bytes"),
        (
            "huffman_delta",
            lambda section: section[:1] + bytes(128) + section[129:],
            "complete.* code",
        ),
    ],
    ids=["kind", "a byte too many", "cut lengths", "no code"],
)
def test_what_is_not_a_section_is_refused(name, change, match):
    indices = np.array([3, 70, 71, 200], dtype=np.uint32)
    section = index_section(name, indices, 3000)
    assert_refused(name, change(section), 4, 3000, match)


def test_native_lengths_are_limited_alike():
    """With Fibonacci frequencies the code reaches the limit.

    Both encoders give the same section.
    """
    frequencies = [1, 1]
    while len(frequencies) < 20:
        frequencies.append(frequencies[-1] + frequencies[-2])
    gaps = np.repeat(np.arange(20), frequencies[::-1])
    indices = np.cumsum(np.random.default_rng(3).permutation(gaps) + 1) - 1
    section = index_section("huffman_delta", indices.astype(np.uint32), int(indices[-1]) + 1)
    assert huffman_code.unpack_lengths(section[1:129]).max() == huffman_code.LONGEST
