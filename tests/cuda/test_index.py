"""Test Rice, EliasFano and Bloom on the device beyond tests/support/codecs_table.py.

The tests use many blocks, wide gaps, extreme rates and sections that are refused.
"""

import emulation
import numpy as np
import pytest
from sampling import parametrize_product

import deepreduce_hvd as dr

KEY = 0xFEDCBA9876543210
GAP_CODECS = {"rice": dr.Rice(), "elias_fano": dr.EliasFano()}
POLICIES = ("naive", "p0", "p1", "leftmost", "p2")


@pytest.fixture(params=[0x00, 0xFF], ids=lambda poison: f"poison{poison:02x}")
def poison(request):
    emulation.set_schedule(0, 0, request.param)
    yield request.param
    emulation.set_schedule()


def chosen(d, k, seed=0):
    """Return k ascending indices below d, without an array of d elements."""
    generator = np.random.default_rng(seed)
    indices = np.unique(generator.integers(0, d, size=2 * k))
    while indices.size < k:
        indices = np.union1d(indices, generator.integers(0, d, size=2 * k))
    return np.sort(generator.choice(indices, size=k, replace=False)).astype(np.uint32)


def same_both_ways(stage, indices, d, value_bits=32.0, spare=0):
    expected, expected_decoded, expected_stay = stage.encode(indices, d, KEY, value_bits)
    section, decoded, stay = emulation.encode_index(stage, indices, d, KEY, value_bits, spare=spare)
    assert section == expected
    np.testing.assert_array_equal(decoded, expected_decoded)
    assert stay == expected_stay
    np.testing.assert_array_equal(
        emulation.decode_index(stage, section, d, decoded.size, misalignment=3, spare=spare),
        decoded,
    )
    return section


LAYOUTS = {
    "sparse": (2**31 - 1, chosen(2**31 - 1, 9000)),
    "two_ends": (2**31 - 1, np.array([0, 2**31 - 2], dtype=np.uint32)),
    "last": (2**31 - 1, np.array([2**31 - 2], dtype=np.uint32)),
    "one_percent": (300_000, chosen(300_000, 3000)),
    "many": (200_000, chosen(200_000, 60_000)),
    "all": (12_289, np.arange(12_289, dtype=np.uint32)),
    "all_but_one": (8193, np.delete(np.arange(8193, dtype=np.uint32), 5000)),
    "whole_blocks": (50_000, chosen(50_000, 8192)),
    "one_more": (50_000, chosen(50_000, 8193)),
    "one_less": (50_000, chosen(50_000, 8191)),
    "clustered": (
        1 << 22,
        np.concatenate([np.arange(5000), (1 << 22) - 5000 + np.arange(5000)]).astype(np.uint32),
    ),
}


@parametrize_product(name=GAP_CODECS, layout=LAYOUTS, spare=[0, 20_000])
def test_gaps(name, layout, spare):
    d, indices = LAYOUTS[layout]
    same_both_ways(GAP_CODECS[name], indices, d, spare=spare)


@pytest.mark.parametrize("name", GAP_CODECS)
def test_gaps_in_any_schedule(name, schedule):
    same_both_ways(GAP_CODECS[name], chosen(100_000, 10_000), 100_000, spare=5000)


@pytest.mark.parametrize("name", GAP_CODECS)
def test_gaps_whatever_memory_holds(name, poison):
    same_both_ways(GAP_CODECS[name], chosen(100_000, 10_000), 100_000, spare=5000)


def agree(stage, section, d, count):
    """Check that device and oracle both accept with the same result, or both refuse.

    Returns whether they accept.
    """
    try:
        expected = stage.decode(section, d, count)
    except dr.CorruptPayloadError:
        with pytest.raises(dr.CorruptPayloadError):
            emulation.decode_index(stage, section, d, count)
        return False
    np.testing.assert_array_equal(emulation.decode_index(stage, section, d, count), expected)
    return True


def flipped(section, bit):
    changed = bytearray(section)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", GAP_CODECS)
@pytest.mark.parametrize("d, k", [(20_000, 8200), (2**31 - 1, 4100)])
def test_flipped_bits_of_several_blocks(name, d, k):
    stage, indices = GAP_CODECS[name], chosen(d, k)
    section = stage.encode(indices, d, KEY)[0]
    assert agree(stage, section, d, k)
    bits = np.random.default_rng(1).integers(0, 8 * len(section), size=150)
    accepted = [
        agree(stage, flipped(section, int(bit)), d, k)
        for bit in (*range(8 * 20), *bits, *range(8 * len(section) - 16, 8 * len(section)))
    ]
    assert any(accepted) or name == "rice"  # a flipped low bit is another valid index
    for count in (k - 1, k + 1, 4096, 1):
        agree(stage, section, d, count)
    agree(stage, section, int(indices[-1]), k)


def test_rice_blocks_that_only_other_encoders_write():
    d, zeros = 100_000, b"\0" * 1000
    # one index with parameter 0: 8007 zeros and a one
    assert agree(dr.Rice(), b"\0" + zeros + b"\x80", d, 1)
    assert not agree(dr.Rice(), b"\0" + zeros + b"\x80", 8007, 1)
    # two indices with long codes, over several tiles of a thread block
    assert agree(dr.Rice(), b"\0" + zeros * 3 + b"\1" + zeros * 3 + b"\1", d, 2)
    assert not agree(dr.Rice(), b"\0" + b"\xff" * 5000, d, 2)
    assert not agree(dr.Rice(), b"\x20" + zeros, d, 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "d, k", [(300_000, 3000), (100_000, 50_000), (65_536, 1), (4097, 4097), (33, 32), (1, 1)]
)
def test_bloom(policy, d, k):
    same_both_ways(dr.Bloom(policy=policy), chosen(d, k), d)
    same_both_ways(dr.Bloom(fpr=1e-3, policy=policy), chosen(d, k), d, spare=500)


@parametrize_product(fpr=[2.0**-33, 1e-6, 0.1, 0.5, 0.7, 0.999], policy=POLICIES)
def test_bloom_rates(policy, fpr):
    for d, k in ((9000, 1), (9000, 3), (9000, 700), (30, 30)):
        same_both_ways(dr.Bloom(fpr=fpr, policy=policy), chosen(d, k), d, spare=40)


@pytest.mark.parametrize("value_bits", [1.0, 5.5, 64.0])
def test_bloom_auto(value_bits):
    for d, k in ((9000, 1), (9000, 90), (9000, 4500), (9000, 8999), (9000, 9000), (1, 1)):
        same_both_ways(dr.Bloom(fpr="auto", policy="p0"), chosen(d, k), d, value_bits, spare=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_bloom_in_any_schedule(policy, schedule):
    same_both_ways(dr.Bloom(fpr=0.02, policy=policy), chosen(40_000, 700), 40_000, spare=100)


@pytest.mark.parametrize("policy", POLICIES)
def test_bloom_whatever_memory_holds(policy, poison):
    same_both_ways(dr.Bloom(fpr=0.02, policy=policy), chosen(40_000, 700), 40_000, spare=100)


def test_few_indices_in_a_large_capacity():
    """A threshold may select 3 of 200,000 elements.

    A filter of few indices is fuller than one of many, and P0 sends all positives.
    """
    for seed in range(20):
        same_both_ways(
            dr.Bloom(fpr=1e-3, policy="p0"),
            chosen(200_000, 1 + seed % 4, seed),
            200_000,
            spare=2000,
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_bloom_sections_that_only_other_encoders_write(policy):
    stage, d = dr.Bloom(fpr=0.02, policy=policy), 500
    head = bytes([POLICIES.index(policy)])
    seed = b"\1\2\3\4" if policy in ("p1", "p2") else b""
    outcomes = set()
    for hashes in (0, 1, 2, 32, 33):
        for bits in (0, 1, 7, 8, 100):
            for byte in (0x00, 0x11, 0xFF):
                section = (
                    head
                    + bytes([hashes])
                    + bits.to_bytes(4, "little")
                    + seed
                    + bytes([byte]) * ((bits + 7) // 8)
                )
                outcomes |= {agree(stage, section, d, count) for count in (1, 30, d - 1, d)}
    assert outcomes == {True, False}


def test_conflict_sets_beyond_the_scratch_are_left_to_the_host():
    d, k = 400_000, 10
    payload, decoded, _ = dr.Bloom(fpr=0.25, policy="p2").encode(chosen(d, k), d, KEY)
    np.testing.assert_array_equal(
        emulation.decode_index(dr.Bloom(fpr=0.25, policy="p2"), payload, d, decoded.size), decoded
    )
    with pytest.raises(dr.UnknownCodecError):
        emulation.decode_index(dr.Bloom(fpr=1e-9, policy="p2"), payload, d, decoded.size)
    with pytest.raises(dr.UnknownCodecError):
        emulation.decode_index(dr.Bloom(fpr=0.25, policy="p1"), payload, d, decoded.size)
    payload, decoded, _ = dr.Bloom(fpr=1e-3, policy="p2").encode(chosen(d, 8000), d, KEY)
    np.testing.assert_array_equal(
        emulation.decode_index(dr.Bloom(fpr=1e-3, policy="p2"), payload, d, decoded.size), decoded
    )
    # a filter with more bits than for 8000 indices at this rate
    with pytest.raises(dr.UnknownCodecError):
        emulation.decode_index(dr.Bloom(fpr=0.5, policy="p2"), payload, d, decoded.size)


def test_what_a_value_costs_has_bounds():
    """Bounds on the bits per value limit the filter for which the host allocates memory."""
    for value_bits in (0.5, 65.0):
        with pytest.raises(dr.InvalidArgumentError):
            emulation.encode_index(
                dr.Bloom(fpr="auto", policy="p0"), chosen(100, 3), 100, KEY, value_bits
            )
