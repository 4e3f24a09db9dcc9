"""Test the accuracy laboratory's sparsifier that keeps the largest elements of each bucket."""

import numpy as np
import pytest
from bucket_topk import BucketTopK

import deepreduce_hvd as dr


def largest_of_buckets(values, bucket, k):
    """Return what it selects, element by element."""
    chosen = []
    for start in range(0, len(values), bucket):
        own = range(start, min(start + bucket, len(values)))
        order = sorted(own, key=lambda index: (-abs(float(values[index])), index))
        chosen += sorted(index for index in order[:k] if values[index] != 0)
    return chosen


@pytest.mark.parametrize("d", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("ratio", [0.01, 0.25, 1.0])
def test_it_selects_the_largest_of_each_bucket(d, ratio):
    sparsifier, bucket = BucketTopK(ratio, bucket=8), 8
    k = max(1, int(ratio * bucket))
    draw = np.random.default_rng(d)
    for _ in range(5):
        values = draw.integers(-3, 4, d).astype(np.float32)  # with zeros and equal magnitudes
        found = sparsifier.select(values, key=0)
        assert found.dtype == np.uint32 and found.tolist() == largest_of_buckets(values, bucket, k)
        assert len(found) <= sparsifier.most_selected(d)
    if d:
        assert len(sparsifier.select(np.ones(d, np.float32), key=0)) == sparsifier.most_selected(d)


def test_its_density_falls_as_that_of_topk():
    sparsifier = BucketTopK(0.01, bucket=500, warmup_steps=4)
    codec = dr.Codec(sparsifier, index=dr.Rice())
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    counts = []
    for step in range(6):
        payload = codec.encode(values, np.zeros_like(values), step=step)
        counts.append(dr.inspect(payload)["k"])
        assert counts[-1] == sparsifier.most_selected(5000, step)
    assert counts[0] == 1250 and counts[4:] == [50, 50]
    assert counts[:5] == sorted(counts[:5], reverse=True)
