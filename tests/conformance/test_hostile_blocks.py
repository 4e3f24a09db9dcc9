"""Test that native decoder and oracle agree on hostile payloads with several blocks.

The conformance suite flips every bit of small payloads. These tests change directories and blocks.
"""

import numpy as np
import pytest
from codecs_table import INDEX, LOSSLESS, VALUE, gradient
from hostile_payloads import resealed
from native_and_numpy import agree

import deepreduce_hvd as dr
from deepreduce_hvd import container

D = 30_000
#: two full blocks of 4096 indices or values, and a part of one
K = 2 * 4096 + 5


def mutations(section, seed, directory=range(0)):
    """Yield mutations of a section.

    Numbers are changed in its directory and at random places, and pieces are swapped, cut and
    repeated.
    """
    random = np.random.default_rng(seed)
    places = [*directory, *random.integers(0, len(section) - 4, 12).tolist()]
    for at in places:
        number = int.from_bytes(section[at : at + 4], "little")
        for changed in (0, number - 1, number + 1, number + 8, 2**32 - 1):
            yield section[:at] + (changed % 2**32).to_bytes(4, "little") + section[at + 4 :]
    for _ in range(6):
        a, b = sorted(random.integers(0, len(section), 2).tolist())
        yield section[:a] + section[b:]
        yield section[:b] + section[a:]
        yield section[b:] + section[:b]
        yield section[:a] + bytes(b - a) + section[b:]


#: position of the directory in a section of three blocks
INDEX_DIRECTORIES = {
    "rice": range(3, 19, 4),
    "huffman": range(1, 9, 4),
    "huffman_delta": range(129, 145, 4),
}
VALUE_DIRECTORIES = {
    "deflate": range(1, 9, 4),
    "deflate_rle": range(1, 9, 4),
    "deflate_plain": range(1, 9, 4),
    "quantile_6": range(157, 165, 4),
}
VALUES = {**VALUE, "quantile_6": dr.Quantile(buckets=6)}


# not of a Bloom filter, which has no blocks and a slow oracle
@pytest.mark.parametrize("name", LOSSLESS)
def test_index_sections(name):
    values = gradient(D)
    parts = container.read(
        dr.Codec(dr.TopK(k=K), index=INDEX[name], value=dr.QSGD(bits=1)).encode(values)
    )
    assert parts.index_id == INDEX[name].stage_id
    section = parts.index
    for parts.index in mutations(section, 1, INDEX_DIRECTORIES.get(name, range(0))):
        agree(container.write(parts), D)


@pytest.mark.parametrize("name", VALUES)
def test_value_sections(name):
    """A block of Deflate has 65536 values. Six buckets, one of them small, get a Huffman code."""
    count = 2 * 65536 + 5 if name.startswith("deflate") else K
    values = np.round(gradient(count) * 100).astype(np.float32)
    if name == "quantile_6":
        values = np.where(np.arange(count) % 500 == 0, np.float32(-1), np.abs(values))
    parts = container.read(dr.Codec(dr.NoneSparsifier(), value=VALUES[name]).encode(values))
    assert parts.value_id == VALUES[name].stage_id
    assert name != "quantile_6" or parts.values[4] == 1, "expected Huffman coded buckets"
    section = parts.values
    for parts.values in mutations(section, 2, VALUE_DIRECTORIES.get(name, range(0))):
        agree(container.write(parts), count)


@pytest.mark.parametrize("name", LOSSLESS)
def test_counts_around_blocks(name):
    """The count in the header implies one block more or less than the section has."""
    values = gradient(D)
    data = dr.Codec(dr.TopK(k=4096), index=INDEX[name], value=dr.QSGD(bits=1)).encode(values)
    for count in (0, 1, 4095, 4097, 8192, 8193, D):
        hostile = data.copy()
        hostile[16:20] = np.frombuffer(count.to_bytes(4, "little"), dtype=np.uint8)
        agree(resealed(hostile), D)
