"""Test that ChunkTopK follows its definition, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays
from native_and_numpy import selected, sent
from native_refusals import assert_core_refuses

import deepreduce_hvd as dr


@settings(max_examples=100, deadline=None)
@given(
    arrays(
        np.float32,
        strategies.integers(1, 200),
        elements=strategies.sampled_from([0, -0.0, 1, -1, 2, -2, 1e-45, 3e38]),
    ),
    strategies.integers(1, 70),
)
def test_chunk_top_k_by_its_definition(values, chunk):
    expected = [
        start + int(np.argmax(np.abs(values[start : start + chunk])))
        for start in range(0, values.size, chunk)
        if values[start : start + chunk].any()
    ]
    payload, _, _ = sent(dr.Codec(dr.ChunkTopK(chunk=chunk), index=dr.RawIndex()), values)
    indices, kept = selected(payload)
    if indices.size < values.size:
        np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(kept, values[indices])
    np.testing.assert_array_equal(dr.ChunkTopK(chunk=chunk).select(values, 0), expected)


@pytest.mark.parametrize("make, says", [
    (lambda: dr.ChunkTopK(), "one of ratio and chunk"), (lambda: dr.ChunkTopK(0), "ratio"),
    (lambda: dr.ChunkTopK(chunk=0), "chunk"), (lambda: dr.ChunkTopK(chunk=2.5), "chunk"),
])  # fmt: skip
def test_bad_parameters(make, says):
    with pytest.raises(dr.InvalidArgumentError, match=rf"{says}.*got"):
        make()


@pytest.mark.parametrize("chunk", [0, 0.5, np.nan, 2.0**31])
def test_the_native_core_refuses_bad_parameters(chunk):
    assert_core_refuses(dr.Residual(), 0, [dr.ChunkTopK.stage_id, chunk])
