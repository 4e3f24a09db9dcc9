"""Bloom: a Bloom filter of the indices, and the Bloom policies that select from its positives."""

import math
import struct

import numpy as np

from deepreduce_hvd.argument_checks import expect_float
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.numerics.exact_log import LN2, exact_log
from deepreduce_hvd.numerics.random import mix64, random32, random_below
from deepreduce_hvd.stages.base import IndexCodec
from deepreduce_hvd.stages.registry import register
from deepreduce_hvd.stages.sections import expect_empty, unpack_header

POLICIES = ("naive", "p0", "p1", "leftmost", "p2")
_NAIVE, _P0, _P1, _LEFTMOST, _P2 = range(5)
_RANDOM = (_P1, _P2)
_HEAD = struct.Struct("<BBI")
_LARGEST_HASHES = 32
_SMALLEST_RATE, _LARGEST_RATE = 2.0**-32, 0.999
_SCAN_BLOCK = 1 << 16


def _rotate(x, bits):
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def murmur3(indices, hash_number):
    """Return MurmurHash3_x86_32 of each index, taken as 4 little-endian bytes.

    The seed of hash number i is i · 0x9E3779B9 mod 2^32.
    """
    block = _rotate(indices.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    seed = np.uint32(hash_number * 0x9E3779B9 & 0xFFFFFFFF)
    x = _rotate(seed ^ block, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    x ^= np.uint32(4)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def positions(indices, hash_number, bits):
    """Return the bit of each index under one hash.

    Multiply-shift scales the hash to [0, bits).
    """
    return (
        (murmur3(indices, hash_number).astype(np.uint64) * np.uint64(bits)) >> np.uint64(32)
    ).astype(np.int64)


def scan(bitmap, hashes, d):
    """Return all positives of a filter in [0, d), as ascending uint32.

    Args:
        bitmap: (m,) bool, the bits of the filter.
        hashes: the number of hashes.
        d: the number of elements.
    """
    found = []
    for first in range(0, d, _SCAN_BLOCK):
        indices = np.arange(first, min(first + _SCAN_BLOCK, d), dtype=np.uint32)
        for hash_number in range(hashes):
            indices = indices[bitmap[positions(indices, hash_number, bitmap.size)]]
        found.append(indices)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint32)


def choose_random(positives, k, key):
    """Apply the Bloom policy P1: return the k positives with the smallest random numbers."""
    counters = np.arange(positives.size)
    drawn = (random32(key, counters).astype(np.uint64) << np.uint64(32)) | counters.astype(
        np.uint64
    )
    chosen = np.sort(drawn)[:k] & np.uint64(0xFFFFFFFF)
    return np.sort(positives[chosen.astype(np.int64)])


def most_positives(hashes, d, count):
    """Return the largest number of positives that P1 and P2 accept.

    Filters that this package writes have at most a fraction h ln 2 / (h − 1) of their bits set. The
    number of positives times the number of hashes therefore stays below 3 d. A filter with more
    positives would make decoding use memory out of proportion to the payload.
    """
    return min(3 * d + 2 * count * hashes + 4096, 0xFFFFFFFF) // hashes


def choose_by_conflict_sets(positives, k, key, hashes, bits):
    """Apply the Bloom policy P2 (DeepReduce, Algorithm 1), in a deterministic form.

    Each positive belongs to the conflict set of every bit that one of its hashes maps to. Sets are
    visited in ascending order of (size, bit). The member of a set of size one is a true positive
    and is taken. From a larger set, the members taken before are dropped, and one of the others is
    drawn. Passes over the sets are repeated until k positives are taken. In the repeated passes, a
    draw that hits a taken member is repeated.

    A drawn member leaves its set, and the last member takes its place. The time of all passes
    together is therefore linear.
    """
    entries = np.stack([positions(positives, i, bits) for i in range(hashes)], axis=1).ravel()
    order = np.argsort(entries, kind="stable")
    bit_of_set, starts, sizes = np.unique(entries[order], return_index=True, return_counts=True)
    members = order // hashes
    taken = set(members[starts[sizes == 1]].tolist())
    if len(taken) > k:
        raise CorruptPayloadError(
            f"index section: expected at most {k} positives that are alone in a conflict "
            f"set, got {len(taken)}"
        )
    visits = np.lexsort((bit_of_set, sizes))
    sets = [members[starts[s] : starts[s] + sizes[s]].tolist() for s in visits[sizes[visits] > 1]]
    draws = 0
    first_pass = True
    while len(taken) < k:
        for i, left in enumerate(sets):
            if len(taken) == k:
                break
            if first_pass:
                sets[i] = left = [j for j in left if j not in taken]
            while left:
                at = int(random_below(key, np.array([draws]), len(left))[0])
                draws += 1
                drawn, left[at] = left[at], left[-1]
                left.pop()
                if drawn not in taken:
                    taken.add(drawn)
                    break
        sets = [left for left in sets if left]
        first_pass = False
    return positives[np.sort(np.fromiter(taken, dtype=np.int64, count=len(taken)))]


@register
class Bloom(IndexCodec):
    """Index codec that stores a Bloom filter of the indices (DeepReduce, section on Bloom filters).

    The receiver tests every index from 0 to d−1. Those that the filter contains are its positives.
    They include false positives, and the Bloom policy decides how to handle them.

    Args:
        fpr: the false-positive rate ε, a number in (0, 1). For k indices, the filter has m = ⌈−k ln
            ε / (ln 2)²⌉ bits and ⌈−log2 ε⌉ hashes. None means 0.1 k/d, the default of the paper.
            "auto" with the Bloom policy "p0" means the rate with the fewest bytes,
            k/(b (ln 2)² (d−k)) for values of b bits. With the other Bloom policies, false positives
            cost accuracy instead of bytes, and "auto" is the same as None.
        policy: the Bloom policy, which handles false positives. "p0" sends the values of all
            positives, which causes no error. "p2" selects k positives by conflict sets, "p1"
            selects k at random, and "leftmost" selects the first k; the values at the selected
            positives are sent. "naive" assigns the k original values to the first k positives. Its
            values are wrong from the first false positive on; it is the baseline of the paper, and
            an error together with a memory. With "leftmost", false positives take the places of the
            last indices, so the end of a tensor is hardly ever sent.

    Raises:
        InvalidArgumentError: ``fpr`` or ``policy`` is not one of the values above. Encoding also
            raises it for a filter of more than 2^32 - 1 bits, or with too many positives for p1 or
            p2.

    >>> Bloom(fpr=0.001, policy="p0").encode(np.array([1, 7], dtype=np.uint32), d=9, key=0)[1]
    array([1, 7], dtype=uint32)
    """

    stage_id = 7

    def __init__(self, fpr: float | str | None = None, policy: str = "p2") -> None:
        if fpr is not None and not (isinstance(fpr, str) and fpr == "auto"):
            fpr = expect_float(
                "Bloom fpr", fpr, 'a number in (0, 1), "auto" or None', lambda fpr: 0 < fpr < 1
            )
        self.fpr = fpr
        if policy not in POLICIES:
            raise InvalidArgumentError(
                f"Bloom policy: expected one of {', '.join(POLICIES)}, got {policy!r}"
            )
        self.policy = policy

    @property
    def misplaces_values(self) -> bool:
        return self.policy == "naive"

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        rate = -1.0 if isinstance(self.fpr, str) else self.fpr or 0.0  # -1: "auto", 0: None
        return (rate, POLICIES.index(self.policy))

    def _rate(self, k, d, value_bits):
        if isinstance(self.fpr, float):
            rate = self.fpr
        elif self.fpr == "auto" and self.policy == "p0":
            cost = value_bits * (LN2 * LN2) * (d - k)
            rate = k / cost if cost > 0 else math.inf
        else:
            rate = 0.1 * k / d
        return min(max(rate, _SMALLEST_RATE), _LARGEST_RATE)

    def encode(
        self, indices: np.ndarray, d: int, key: int, value_bits: float = 32.0
    ) -> tuple[bytes, np.ndarray, bool]:
        k = indices.size
        if k == 0:
            return b"", indices, False
        log_rate = exact_log(self._rate(float(k), float(d), value_bits))
        bits = max(math.ceil(-(k * log_rate) / (LN2 * LN2)), 1)
        if bits > 0xFFFFFFFF:
            raise InvalidArgumentError(
                f"Bloom filter: expected at most 4294967295 bits, got {bits}; use a "
                "larger fpr or split the tensor"
            )
        hashes = max(math.ceil(-log_rate / LN2), 1)
        bitmap = np.zeros(bits, dtype=bool)
        for hash_number in range(hashes):
            bitmap[positions(indices, hash_number, bits)] = True
        policy = POLICIES.index(self.policy)
        seed = key & 0xFFFFFFFF if policy in _RANDOM else 0
        section = _HEAD.pack(policy, hashes, bits)
        if policy in _RANDOM:
            section += struct.pack("<I", seed)
        section += np.packbits(bitmap, bitorder="little").tobytes()
        decoded = self._apply(bitmap, hashes, policy, seed, d, k, decoding=False)
        return section, decoded, policy == _NAIVE

    @staticmethod
    def _apply(bitmap, hashes, policy, seed, d, count, decoding):
        positives = scan(bitmap, hashes, d)
        if positives.size < count or (policy == _P0 and decoding and positives.size != count):
            raise CorruptPayloadError(
                f"index section: expected a Bloom filter with {count} positives, got "
                f"{positives.size}"
            )
        if policy == _P0:
            return positives
        if policy not in _RANDOM:
            return positives[:count]
        most = most_positives(hashes, d, count)
        if positives.size > most:
            if not decoding:
                raise InvalidArgumentError(
                    f"Bloom filter: expected at most {most} positives, got "
                    f"{positives.size}; use policy p0 or split the tensor"
                )
            raise CorruptPayloadError(
                f"index section: expected a Bloom filter for {count} of {d} indices with "
                f"at most {most} positives, got {positives.size}"
            )
        key = mix64(seed)
        if policy == _P1:
            return choose_random(positives, count, key)
        return choose_by_conflict_sets(positives, count, key, hashes, bitmap.size)

    @classmethod
    def decode(cls, section: bytes, d: int, count: int) -> np.ndarray:
        if count == 0:
            expect_empty(section, "index")
            return np.zeros(0, dtype=np.uint32)
        policy, hashes, bits = unpack_header(_HEAD, section, "index")
        if policy > _P2 or not 1 <= hashes <= _LARGEST_HASHES or bits < 1:
            raise CorruptPayloadError(
                f"index section: expected a Bloom policy of 0 to 4, 1 to {_LARGEST_HASHES} "
                f"hashes and at least 1 bit, got {policy}, {hashes} and {bits}"
            )
        at = _HEAD.size + (4 if policy in _RANDOM else 0)
        if len(section) != at + (bits + 7) // 8:
            raise CorruptPayloadError(
                f"index section: expected {at + (bits + 7) // 8} bytes, got {len(section)}"
            )
        seed = struct.unpack_from("<I", section, _HEAD.size)[0] if policy in _RANDOM else 0
        bitmap = np.unpackbits(
            np.frombuffer(section[at:], dtype=np.uint8), bitorder="little"
        ).astype(bool)
        if bitmap[bits:].any():
            raise CorruptPayloadError("index section: expected zero padding, got bits that are set")
        return cls._apply(bitmap[:bits], hashes, policy, seed, d, count, decoding=True)
