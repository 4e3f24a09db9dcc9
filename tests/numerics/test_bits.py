"""Test sequences of bit fields of several widths."""

import pytest
from hypothesis import given, strategies

import deepreduce_hvd as dr
from deepreduce_hvd.numerics import bits


@given(
    strategies.lists(
        strategies.integers(0, 32).flatmap(
            lambda w: strategies.tuples(strategies.integers(0, 2**w - 1), strategies.just(w))
        )
    )
)
def test_varied_fields_round_trip(fields):
    values, widths = [value for value, _ in fields], [width for _, width in fields]
    data = bits.pack_varied(values, widths)
    assert len(data) == (sum(widths) + 7) // 8
    assert bits.unpack_varied(data, widths).tolist() == values


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00", b"\x00\x80"])
def test_varied_fields_must_fill_the_bytes(data):
    with pytest.raises(dr.CorruptPayloadError):
        bits.unpack_varied(data, [5, 6])
