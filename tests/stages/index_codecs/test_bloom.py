"""Test the Bloom index codec: size, false positives, policies and hostile filters.

False positives are compared with the formula and with an independent filter.
"""

import math
import struct

import numpy as np
import pybloom_live
import pytest
from codecs_table import gradient
from sampling import parametrize_product

import deepreduce_hvd as dr
from deepreduce_hvd import _native, container
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy
from deepreduce_hvd.stages.index_codecs.bloom import POLICIES, murmur3, scan


def support(d, k, seed=0):
    return np.sort(np.random.default_rng(seed).choice(d, k, replace=False)).astype(np.uint32)


def on_support(d, indices):
    values = np.zeros(d, dtype=np.float32)
    values[indices] = 1 + np.arange(indices.size, dtype=np.float32) / max(indices.size, 1)
    return values


@pytest.mark.parametrize(
    ("key", "seed", "expected"),
    # MurmurHash3_x86_32 of four zero bytes and of 21 43 65 87, from the reference implementation's
    # test vectors
    [(0, 0, 0x2362F9DE), (0x87654321, 0, 0xF55B516B)],
)
def test_murmur3_is_the_published_hash(key, seed, expected):
    assert int(murmur3(np.array([key], dtype=np.uint32), seed)[0]) == expected


@pytest.mark.parametrize("rate", [0.1, 1e-2, 1e-3, 1e-4])
def test_size_and_false_positives_follow_the_formula(rate):
    d, k = 4_000_000, 40_000
    data = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy="p0")).encode(
        on_support(d, support(d, k))
    )
    info = dr.inspect(data)
    assert 8 * info["index_bytes"] <= 1.01 * k * math.log(1 / rate) / math.log(2) ** 2
    measured = (info["k"] - k) / (d - k)
    # within 10 %, or within four standard deviations if there are few false positives
    assert abs(measured / rate - 1) <= max(0.10, 4 / math.sqrt(rate * (d - k)))


def test_false_positives_like_an_independent_filter():
    d, k, rate = 200_000, 2_000, 0.01
    indices = support(d, k)
    theirs = pybloom_live.BloomFilter(capacity=k, error_rate=rate)
    for index in indices.tolist():
        theirs.add(index)
    others = np.setdiff1d(np.arange(d), indices)
    their_rate = sum(int(index) in theirs for index in others) / others.size
    ours = dr.inspect(
        dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy="p0")).encode(on_support(d, indices))
    )
    our_rate = (ours["k"] - k) / others.size
    assert our_rate <= 1.15 * max(their_rate, rate) and our_rate >= 0.85 * min(their_rate, rate)
    # the reference rounds its bits up to whole slices; ours is not larger
    assert 8 * ours["index_bytes"] <= theirs.num_bits + 64


@pytest.mark.parametrize("k", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("rate", [0.5, 0.05, 1e-3, None])
def test_no_false_negatives(k, rate):
    d = 50_000
    indices = support(d, k, seed=k)
    section, positives, _ = dr.Bloom(fpr=rate, policy="p0").encode(indices, d, key=0)
    assert np.isin(indices, positives).all()
    np.testing.assert_array_equal(dr.Bloom.decode(section, d, positives.size), positives)


@pytest.mark.parametrize("policy", POLICIES)
def test_count_of_each_policy(policy):
    d, k = 20_000, 400
    indices = support(d, k)
    section, decoded, values_stay = dr.Bloom(fpr=0.05, policy=policy).encode(indices, d, key=77)
    assert values_stay == (policy == "naive")
    assert (np.diff(decoded.astype(np.int64)) > 0).all()
    assert decoded.size > k if policy == "p0" else decoded.size == k
    np.testing.assert_array_equal(dr.Bloom.decode(section, d, decoded.size), decoded)


def test_conflict_sets_find_more_true_positives_than_chance():
    """P2 chooses more correct indices among the positives than the random choice of P1."""
    d, k = 40_000, 400
    indices = support(d, k)
    right = {
        policy: np.mean(
            [
                np.isin(
                    dr.Bloom(fpr=0.01, policy=policy).encode(indices, d, key)[1], indices
                ).mean()
                for key in range(5)
            ]
        )
        for policy in ("p1", "p2")
    }
    assert right["p2"] > right["p1"] + 0.1


def test_pitfall_p2_ends_even_when_every_set_is_used_up():
    """The filter is so full that one pass over the sets cannot choose enough indices."""
    for d, k, rate in ((50, 40, 0.9), (1000, 999, 0.99), (300, 1, 0.999), (5, 4, 0.5)):
        indices = support(d, k)
        section, decoded, _ = dr.Bloom(fpr=rate, policy="p2").encode(indices, d, key=1)
        assert decoded.size == k
        np.testing.assert_array_equal(dr.Bloom.decode(section, d, k), decoded)


def hostile(d, count, policy, hashes, bits, filter_bytes, seed=b""):
    section = struct.pack("<BBI", policy, hashes, bits) + seed + filter_bytes
    return container.write(
        container.Payload(d, count, index_id=7, value_id=1, index=section, values=bytes(4 * count))
    )


def native_indices(data, d, simd=-1):
    """Return the indices that the native decoder finds, or None if it refuses the section."""
    try:
        return _native.decode_sparse([data], d, 1.0, simd)[0]
    except dr.CorruptPayloadError:
        return None


def oracle_indices(data, d):
    parts = container.read(data)
    try:
        return dr.Bloom.decode(parts.index, d, parts.count)
    except dr.CorruptPayloadError:
        return None


@pytest.mark.parametrize("hashes", [1, 2, 3])
def test_pitfall_p2_is_linear_when_all_share_one_set(hashes):
    """One bit contains all indices. A draw that walks over the set would take 10^12 steps."""
    d = 1 << 20
    np.testing.assert_array_equal(
        native_indices(hostile(d, d, 4, hashes, 1, b"\x01", bytes(4)), d), np.arange(d)
    )


@pytest.mark.parametrize(
    ("d", "k", "rate"),
    [(3000, 2900, 0.999), (3000, 700, 0.97), (3000, 2000, 0.6), (5000, 4000, 0.3)],
)
def test_p2_in_many_passes_is_the_same_at_every_simd_level(d, k, rate):
    section, decoded, _ = dr.Bloom(fpr=rate, policy="p2").encode(support(d, k), d, key=5)
    data = container.write(
        container.Payload(d, k, index_id=7, value_id=1, index=section, values=bytes(4 * k))
    )
    for simd in range(_native.simd_level() + 1):
        np.testing.assert_array_equal(native_indices(data, d, simd), decoded)


@parametrize_product(rate=[0.999, 0.49, 0.24, 0.124, 0.0624, 1e-9], policy=POLICIES, k=[1, 2, 3])
def test_few_indices_in_a_filter_that_happens_to_be_full(rate, k, policy):
    """A small filter may have far more positives than its rate predicts.

    The encoder must not refuse its own filter.
    """
    d = 10_000
    codec = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy=policy))
    for seed in range(20):
        values = on_support(d, support(d, k, seed))
        data, oracle_data = (
            encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 0, seed, 0, 0, native=native)[0]
            for native in (True, False)
        )
        assert data.tobytes() == oracle_data.tobytes()
        decoded, oracle = (
            decode_sum_numpy([data], np.zeros(d, dtype=np.float32), 1.0, native=native)
            for native in (True, False)
        )
        np.testing.assert_array_equal(decoded, oracle)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fpr", [None, "auto", 0.01])
@pytest.mark.parametrize("d", [1, 2, 300])
def test_all_elements_are_kept(d, fpr, policy):
    """Test k = d, where the rate of "auto" would divide by d - k = 0."""
    _, decoded, _ = dr.Bloom(fpr=fpr, policy=policy).encode(np.arange(d, dtype=np.uint32), d, key=0)
    np.testing.assert_array_equal(decoded, np.arange(d))
    data = dr.Codec(dr.TopK(k=d), index=dr.Bloom(fpr=fpr, policy=policy)).encode(
        np.ones(d, dtype=np.float32)
    )
    np.testing.assert_array_equal(dr.decode(data), np.ones(d, dtype=np.float32))


def test_hostile_more_sets_of_one_than_indices():
    """A bit that only one positive meets must have been set by that index.

    No encoder writes a filter with more such bits than `count`.
    """
    d, k = 2_000, 40
    section, _, _ = dr.Bloom(fpr=1e-3, policy="p2").encode(support(d, k), d, key=0)
    data = container.write(
        container.Payload(
            d, k - 5, index_id=7, value_id=1, index=section, values=bytes(4 * (k - 5))
        )
    )
    with pytest.raises(dr.CorruptPayloadError, match="alone in a conflict set, got 4"):
        dr.decode(data)
    assert oracle_indices(data, d) is None


@pytest.mark.parametrize(
    ("policy", "filters"),
    [
        (0, 80),
        (1, 80),
        (2, 80),
        (3, 80),
        (4, 20),  # only a sample for P2, whose oracle is slow
        pytest.param(4, 80, marks=pytest.mark.slow),
    ],
)
def test_hostile_filters_native_agrees_with_oracle(policy, filters):
    """Both decoders refuse random filters of every density and count, or find the same indices."""
    random = np.random.default_rng(policy)
    accepted = 0
    for _ in range(filters):
        d, bits, hashes = (
            int(random.integers(1, 3000)),
            int(random.integers(1, 200)),
            int(random.integers(1, 8)),
        )
        filled = (random.random(bits) < random.choice([0.1, 0.5, 0.9, 1.0])).astype(np.uint8)
        seed = random.bytes(4) if policy in (2, 4) else b""
        positives = scan(filled.astype(bool), hashes, d).size
        count = min(max(positives + int(random.choice([0, 0, 1, -1, -positives // 2])), 1), d)
        data = hostile(
            d, count, policy, hashes, bits, np.packbits(filled, bitorder="little").tobytes(), seed
        )
        native, oracle = native_indices(data, d), oracle_indices(data, d)
        assert (native is None) == (oracle is None)
        if native is not None:
            np.testing.assert_array_equal(native, oracle)
            accepted += 1
    assert filters / 8 < accepted < filters * 15 / 16


def test_pitfall_p0_count_does_not_pass_through_the_value_type():
    """With more than 65,504 positives and float16 values, the count is an integer in the header."""
    d, k = 300_000, 70_000
    codec = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=1e-3, policy="p0"), value=dr.Float16())
    info = dr.inspect(codec.encode(on_support(d, support(d, k))))
    assert info["k"] >= k and info["value"] == "Float16" and info["index"] == "Bloom"


def test_pitfall_values_stay_with_their_indices():
    """In 'both' mode with lossless values, the receiver gets the gradient at the positives."""
    values = gradient(30_000)
    codec = dr.Codec(dr.TopK(0.01), index=dr.Bloom(fpr=1e-3, policy="p2"), value=dr.FitPoly())
    decoded = dr.decode(codec.encode(values))
    sent = decoded != 0
    assert np.linalg.norm(decoded[sent] - values[sent]) < 0.1 * np.linalg.norm(values[sent])


def test_pitfall_seed_travels_and_is_keyed():
    """Ranks draw differently, and receivers agree.

    The seed is in the section, and depends on the position.
    """
    values = gradient(5_000)
    codec = dr.Codec(dr.TopK(0.05), index=dr.Bloom(fpr=0.05, policy="p1"))
    one, again, other = (codec.encode(values, rank=rank) for rank in (0, 0, 1))
    assert one.tobytes() == again.tobytes() != other.tobytes()


def test_auto_rate_is_where_p0_is_smallest():
    d, k = 1_000_000, 10_000
    values = on_support(d, support(d, k))

    def size(rate):
        return dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=rate, policy="p0")).encode(values).size

    auto = size("auto")
    assert all(auto <= 1.002 * size(rate) for rate in (1e-2, 3e-3, 1e-3, 5e-4, 2e-4, 1e-4))


@pytest.mark.parametrize(
    "arguments",
    [{"fpr": 0}, {"fpr": 1}, {"fpr": -0.1}, {"fpr": "best"}, {"fpr": True}, {"policy": "p3"}],
)
def test_bad_settings_are_refused(arguments):
    with pytest.raises(dr.InvalidArgumentError, match=r"expected .*, got"):
        dr.Bloom(**arguments)


@pytest.mark.parametrize("policy", range(5))
def test_hostile_full_filter_is_refused_without_memory(policy):
    """All bits are set, so every index is a positive.

    Memory and time for small counts must not grow with the number of hashes.
    """
    seed = bytes(4) if policy in (2, 4) else b""
    data = hostile(2**22, 3, policy, 32, 64, b"\xff" * 8, seed)
    if policy in (0, 3):
        indices, _ = dr.decode_sum_sparse([data], 2**22)
        np.testing.assert_array_equal(indices, [0, 1, 2])
    else:
        with pytest.raises(dr.CorruptPayloadError, match="expected a Bloom filter"):
            dr.decode_sum_sparse([data], 2**22)


def test_scan_is_the_same_at_every_simd_level():
    d, k = 100_003, 3_000
    data = dr.Codec(dr.TopK(k=k), index=dr.Bloom(fpr=0.02, policy="p0")).encode(
        on_support(d, support(d, k))
    )
    section = container.read(data).index
    hashes, bits = section[1], struct.unpack_from("<I", section, 2)[0]
    bitmap = np.unpackbits(np.frombuffer(section[6:], dtype=np.uint8), bitorder="little")[
        :bits
    ].astype(bool)
    expected = scan(bitmap, hashes, d)
    for simd in range(_native.simd_level() + 1):
        np.testing.assert_array_equal(_native.decode_sparse([data], d, 1.0, simd)[0], expected)
