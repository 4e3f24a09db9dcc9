"""Test the accuracy laboratory's oracle communicators, which know the gradients of all ranks."""

import itertools

import numpy as np
import oracles
import pytest
from virtual_ranks import VirtualRanks

import deepreduce_hvd as dr


@pytest.mark.parametrize("oracle", [oracles.LargestOfSum, oracles.LargestOfSelections])
def test_an_oracle_sends_the_largest_elements_of_all_ranks(oracle):
    """An oracle sends the k largest elements of the sum over all ranks, and nothing is lost."""
    draw = np.random.default_rng(3)
    shapes, counts = {"second": 3000, "first": 2000}, {"second": 60, "first": 40}
    ranks = VirtualRanks(4, shapes, dr.Codec(dr.TopK(0.02)), communicator=oracle())
    for _ in range(5):
        gradients = [
            {name: draw.laplace(size=d).astype(np.float32) for name, d in shapes.items()}
            for _ in range(4)
        ]
        whole = [
            {name: own[name] + state[name][0] for name in shapes}
            for own, state in zip(gradients, ranks._states)
        ]
        sums = {name: np.sum([own[name] for own in whole], axis=0) for name in shapes}
        selected = sums
        if oracle is oracles.LargestOfSelections:
            selected = {name: np.zeros(d, dtype=np.float32) for name, d in shapes.items()}
            for own, name in itertools.product(whole, shapes):
                places = np.argsort(-np.abs(own[name]), kind="stable")[: counts[name]]
                selected[name][places] += own[name][places]
        means = ranks.mean(gradients)
        sent = {name: np.flatnonzero(mean) for name, mean in means.items()}
        magnitudes = {name: np.abs(values) for name, values in selected.items()}
        if oracle is oracles.LargestOfSum:
            for name, k in counts.items():
                assert set(sent[name]) == set(np.argsort(-magnitudes[name], kind="stable")[:k])
        else:
            least = np.sort(np.concatenate(list(magnitudes.values())))[-100]
            for name in shapes:
                assert set(sent[name]) == set(np.flatnonzero(magnitudes[name] >= least))
        for name, mean in means.items():
            np.testing.assert_allclose(
                mean[sent[name]], sums[name][sent[name]] / 4, rtol=1e-5, atol=1e-6
            )
            left = np.sum([state[name][0] for state in ranks._states], axis=0)
            np.testing.assert_allclose(4 * mean + left, sums[name], atol=1e-4)
