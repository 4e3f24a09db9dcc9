"""Train with the published dictionaries of GRACE and DeepReduce on stock Horovod.

Some scenarios compare the results with those of GRACE's stages. Started by test_torch_published.py
under horovodrun.
"""

import sys
import warnings

import horovod.torch as hvd
import torch
from published_params import PUBLISHED
from torch_tools import (
    assert_equal_everywhere,
    backward,
    gradients,
    local_gradients,
    model,
    run_all,
    sum_over_ranks,
)

import deepreduce_hvd as dr


def trained(params, steps, after=lambda network, step: None):
    """Train for some steps with the compressor of a dictionary; return the model."""
    network = model()
    named = list(network.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor = dr.from_params(params, named)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1),
        named_parameters=named,
        compression=compressor,
    )
    for step in range(steps):
        own = local_gradients(network, step)
        optimizer.zero_grad()
        backward(network, step)
        optimizer.synchronize()
        after(network, own)
        with optimizer.skip_synchronize():
            optimizer.step()
    return network


def scenario_every_published_dictionary_trains(directory):
    for number, published in enumerate(PUBLISHED):
        network = trained(published.params, 3)
        start = dict(model().named_parameters())
        assert_equal_everywhere(list(network.named_parameters()), f"published.{number}")
        for name, parameter in network.named_parameters():
            assert torch.isfinite(parameter).all() and not torch.equal(parameter, start[name]), (
                published.source,
                name,
            )


def scenario_topk_with_residual_is_that_of_grace(directory):
    """Every tensor gets the mean over ranks of the largest 30 % of gradient + residual.

    Small tensors are compressed too.
    """
    residuals = {}

    def expect_grace(network, own):
        for name, reduced in gradients(network):
            accumulated = (residuals.get(name, 0) + own[name]).reshape(-1)
            kept = accumulated.abs().topk(max(1, int(0.3 * accumulated.numel()))).indices
            sent = torch.zeros_like(accumulated).index_copy(0, kept, accumulated[kept])
            residuals[name] = (accumulated - sent).view(reduced.shape)
            expected = sum_over_ranks(sent, f"sent.{name}") / hvd.size()
            assert torch.allclose(reduced.reshape(-1).double(), expected, rtol=1e-5, atol=1e-9), (
                name
            )

    trained(
        {"compressor": "topk", "memory": "residual", "communicator": "allgather"}, 4, expect_grace
    )


def scenario_none_with_allreduce_is_plain_horovod(directory):
    def expect_mean(network, own):
        for name, reduced in gradients(network):
            assert torch.allclose(
                reduced.double(),
                sum_over_ranks(own[name], f"own.{name}") / hvd.size(),
                rtol=1e-5,
                atol=1e-9,
            ), name

    trained({"compressor": "none", "memory": "none", "communicator": "allreduce"}, 2, expect_mean)


if __name__ == "__main__":
    hvd.init()
    run_all(globals(), sys.argv[1])
