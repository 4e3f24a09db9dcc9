"""Test that RandomK draws uniformly, and the same elements on all ranks."""

import numpy as np
import pytest
from codecs_table import gradient
from native_and_numpy import selected, sent
from native_refusals import assert_core_refuses
from scipy.stats import chi2

import deepreduce_hvd as dr
from deepreduce_hvd.stages.sparsifiers.random_k import permuted


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16, 17, 1000, 4096])
def test_random_permutation_is_one(d):
    np.testing.assert_array_equal(
        np.sort(permuted(99, d, np.arange(d, dtype=np.uint32))), np.arange(d)
    )


@pytest.mark.parametrize(
    "d, k",
    [
        (10, 3),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(33, 8, marks=pytest.mark.slow),
    ],
)
def test_random_k_is_uniform(d, k):
    draws = 6000
    counts = np.zeros(d)
    for step in range(draws):
        indices, _ = selected(
            sent(dr.Codec(dr.RandomK(k=k)), np.zeros(d, dtype=np.float32), step=step)[0]
        )
        assert indices.size == np.unique(indices).size == k
        counts[indices] += 1
    expected = draws * k / d
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), d - 1) > 1e-4


def test_random_k_pairs_are_uniform():
    draws, d = 6000, 7
    counts = np.zeros((d, d))
    for step in range(draws):
        a, b = selected(
            sent(dr.Codec(dr.RandomK(k=2)), np.zeros(d, dtype=np.float32), step=step)[0]
        )[0]
        counts[a, b] += 1
    expected = draws / (d * (d - 1) / 2)
    pairs = counts[np.triu_indices(d, 1)]
    assert pairs.sum() == draws
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), pairs.size - 1) > 1e-4


def test_random_k_is_the_same_on_all_ranks_and_new_at_every_step():
    codec = dr.Codec(dr.RandomK(0.01))
    ranks = [
        dr.decode_sum_sparse([codec.encode(gradient(10_000, key=rank), step=3, rank=rank)], 10_000)[
            0
        ]
        for rank in range(3)
    ]
    np.testing.assert_array_equal(ranks[0], ranks[1])
    np.testing.assert_array_equal(ranks[0], ranks[2])
    other = dr.decode_sum_sparse([codec.encode(gradient(10_000), step=4)], 10_000)[0]
    assert np.intersect1d(ranks[0], other).size < 20  # 1 is expected
    tensor = dr.decode_sum_sparse([codec.encode(gradient(10_000), step=3, tensor=1)], 10_000)[0]
    assert np.intersect1d(ranks[0], tensor).size < 20


@pytest.mark.parametrize("make, says", [
    (lambda: dr.RandomK(), "one of ratio and k"), (lambda: dr.RandomK(-0.1), "ratio"),
    (lambda: dr.RandomK(20), "float in"), (lambda: dr.RandomK(k=np.inf), "k"),
])  # fmt: skip
def test_bad_parameters(make, says):
    with pytest.raises(dr.InvalidArgumentError, match=rf"{says}.*got"):
        make()


@pytest.mark.parametrize("ratio, k", [(0, 0), (2, 0)])
def test_the_native_core_refuses_bad_parameters(ratio, k):
    assert_core_refuses(dr.Residual(), 0, [dr.RandomK.stage_id, ratio, k])
