"""Test Deflate: it is lossless, block boundaries, and sizes."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from value_sections import ARRAYS, assert_same_bits, section_and_decoded

import deepreduce_hvd as dr


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
