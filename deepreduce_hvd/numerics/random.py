"""The counter-based random number generator in NumPy.

Every random choice is a pure function of (seed, step, tensor, rank, purpose, counter). It needs no
state and is the same on every rank, machine and device. The tests compare csrc/support/random.h
with this file, bit for bit.
"""

import enum

import numpy as np

_MASK = 0xFFFFFFFFFFFFFFFF


class Purpose(enum.IntEnum):
    """The purpose of a random choice. Different purposes have different keys."""

    SELECTION = 1
    ROUNDING = 2
    BLOOM_POLICY = 3


def mix64(x):
    """Return the result of one SplitMix64 step (Steele, Lea, Flood 2014) on a Python integer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_key(seed, step, tensor, rank, purpose):
    """Return the 64-bit key for the random choices of one tensor in one step."""
    key = mix64(int(seed) & _MASK)  # NumPy's integers do not have 64 bits without a sign
    for part in (step, tensor, rank, int(purpose)):
        key = mix64(key ^ (int(part) & _MASK))
    return key


def random32(key, counters):
    """Return 32 uniform random bits for each counter.

    Args:
        key: a 64-bit key.
        counters: an array of integers below 2^32.
    """
    x = np.asarray(counters).astype(np.uint32) * np.uint32(0x9E3779B1)
    x += np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x += np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def random_uniform(key, counters):
    """Return one uniform float32 in [0, 1), with 24 random bits, for each counter."""
    return (random32(key, counters) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def random_below(key, counters, bound):
    """Return one uniform integer in [0, bound) for each counter."""
    return ((random32(key, counters).astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(
        np.uint32
    )
