"""Test RawIndex: its bytes, and the sections that it refuses."""

import numpy as np
import pytest
from index_sections import index_section

import deepreduce_hvd as dr
from deepreduce_hvd import container, reference


@pytest.mark.parametrize("indices", [[4], [0, 2**24 - 1, 2**24], [*range(1000)]])
def test_four_bytes_per_index(indices):
    section = index_section("raw_index", np.array(indices, dtype=np.uint32), 2**24 + 1)
    assert section == b"".join(index.to_bytes(4, "little") for index in indices)


@pytest.mark.parametrize(
    ("indices", "match"),
    [([3, 3], "distinct"), ([10, 3], "below d = 10, got 10"), ([3, 4, 5], "expected .*bytes")],
    ids=["twice", "beyond d", "three"],
)
def test_what_is_not_two_indices_in_any_order_is_refused(indices, match):
    section = np.array(indices, dtype="<u4").tobytes()
    values, _, _ = dr.FitDExp().encode(np.array([2, 1], dtype=np.float32), key=0)
    data = container.write(
        container.Payload(
            10, 2, index_id=1, value_id=dr.FitDExp.stage_id, order=2, index=section, values=values
        )
    )
    with pytest.raises(dr.CorruptPayloadError, match=match):
        dr.decode_sum_sparse([data], 10)
    with pytest.raises(dr.CorruptPayloadError, match=match):
        dr.RawIndex.decode(section, 10, 2)


@pytest.mark.parametrize("order", [0, 1])
def test_indices_that_should_ascend_and_do_not(order):
    """RawIndex supports any order, but the header must say so. Sparse sums rely on it."""
    payload = container.Payload(
        10,
        2,
        index_id=1,
        value_id=1,
        index=np.array([7, 3], dtype="<u4").tobytes(),
        values=bytes(8),
    )
    if order == 1:
        payload.value_id, payload.order, payload.order_map = dr.FitDExp.stage_id, 1, b"\2"
        payload.values, _, _ = dr.FitDExp().encode(np.array([2, 1], dtype=np.float32), key=0)
    data = container.write(payload)
    with pytest.raises(dr.CorruptPayloadError, match="ascending"):
        dr.decode_sum_sparse([data], 10)
    with pytest.raises(dr.CorruptPayloadError, match="ascending"):
        reference.decode_sparse(data, 10)
