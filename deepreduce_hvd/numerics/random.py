"""The counter-based generator in NumPy: the oracle of csrc/random.h, equal to it bit for bit.

Every random choice is a pure function of (seed, step, tensor, rank, purpose, counter), so that it
is the same on every rank, machine and device and needs no state.
"""

import enum

import numpy as np

_MASK = 0xFFFFFFFFFFFFFFFF


class Purpose(enum.IntEnum):
    """What a random choice is for; keys of different purposes never meet."""

    SELECTION = 1
    ROUNDING = 2
    BLOOM_POLICY = 3


def mix64(x):
    """One SplitMix64 step (Steele, Lea, Flood 2014) of a Python integer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_key(seed, step, tensor, rank, purpose):
    """The 64-bit key of one tensor's choices in one step."""
    key = mix64(seed & _MASK)
    for part in (step, tensor, rank, int(purpose)):
        key = mix64(key ^ (part & _MASK))
    return key


def random32(key, counters):
    """32 uniform bits for each counter; ``counters`` is an array of integers below 2^32."""
    x = np.asarray(counters).astype(np.uint32) * np.uint32(0x9E3779B1)
    x += np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x += np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def random_uniform(key, counters):
    """Uniform float32 in [0, 1) with 24 bits, one for each counter."""
    return (random32(key, counters) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def random_below(key, counters, bound):
    """Uniform integers in [0, bound), one for each counter."""
    return ((random32(key, counters).astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(
        np.uint32
    )
