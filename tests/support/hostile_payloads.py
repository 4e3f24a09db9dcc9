"""Hostile payloads with valid checksums, and comparison of decoders on them."""

import numpy as np

import deepreduce_hvd as dr
from deepreduce_hvd import container


def resealed(data):
    """Return the bytes with a matching checksum, as an attacker would send them."""
    data = data.copy()
    data[32:40] = np.frombuffer(container.checksum(data).to_bytes(8, "little"), dtype=np.uint8)
    return data


def with_hostile_sections(data):
    """Yield the payload of 300 elements with changed sections and counts.

    Each section is cut, extended and overwritten. All payloads have matching checksums.
    """
    parts = container.read(data)
    for field in ("index", "values", "order_map"):
        original = getattr(parts, field)
        for changed in (
            b"",
            original[:-1],
            original + b"\0",
            original + original,
            b"\xff" * len(original),
            b"\0" * len(original),
        ):
            setattr(parts, field, changed)
            yield container.write(parts)
        setattr(parts, field, original)
    for count in (0, 1, 29, 31, 299, 300):
        hostile = container.write(parts)
        hostile[16:20] = np.frombuffer(count.to_bytes(4, "little"), dtype=np.uint8)
        yield resealed(hostile)


def outcome(decode):
    """Return the result of ``decode()``, or the type of its error."""
    try:
        return decode()
    except dr.DeepReduceError as error:
        return type(error)


def expect_same_outcome(decode, oracle):
    """Check that both accept with the same result, or both refuse with the same error."""
    mine, expected = outcome(decode), outcome(oracle)
    if isinstance(mine, type) or isinstance(expected, type):
        assert mine is expected, (mine, expected)
    else:
        np.testing.assert_array_equal(mine.view(np.uint32), expected.view(np.uint32))
