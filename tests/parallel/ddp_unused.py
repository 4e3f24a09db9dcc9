"""Parameters of PyTorch's DDP that no rank uses in a backward pass; run by ddp_scenarios.py."""

import torch
import torch.distributed as dist
from ddp_tools import Network, distributed, gradients_of, loss_of

import deepreduce_hvd as dr


def scenario_unused_parameters_stay_out_of_encoded_sums(directory):
    """False positives of a Bloom filter are in the sum, which DDP discards for such parameters."""
    codec = dr.Codec(dr.TopK(0.1), index=dr.Bloom(fpr=0.05, policy="p2"), value=dr.FitPoly())
    uses = [(True, True), (False, False), (False, True), (False, False), (True, False)]
    for communicator in (dr.SplitAllgather(), dr.RecursiveDoubling()):
        network = Network()
        ddp = {"find_unused_parameters": True, "bucket_cap_mb": 25}
        model, compressor = distributed(
            network, codec, ddp=ddp, communicator=communicator, dense_below=0
        )
        rank, before = dist.get_rank(), compressor.state_dict()["parameters"]
        came_in = {
            name: torch.zeros(one.shape).double() for name, one in network.named_parameters()
        }
        arrived = {
            name: torch.zeros(one.shape).double() for name, one in network.named_parameters()
        }
        for step, used in enumerate(uses):
            network.zero_grad()
            used = [used[number % 2] for number in range(dist.get_world_size())]
            for number, branch in enumerate(used):
                own = gradients_of(
                    network, lambda other: loss_of(other, step, number, branch).backward()
                )
                for name, one in own.items():
                    came_in[name] += 0 if one is None else one.double()
            loss_of(model, step, rank, used[rank]).backward()
            saved = compressor.state_dict()["parameters"]
            for name, parameter in network.named_parameters():
                unused = name.startswith("branch") and not any(used)
                assert (parameter.grad is None) == unused, (step, name)
                if unused:
                    kept = (one[name]["memory"]["residual"] for one in (before, saved))
                    assert torch.equal(*kept), (communicator, step, name)
                else:
                    arrived[name] += parameter.grad.double() * dist.get_world_size()
            before = saved
        for name, one in saved.items():
            left = one["memory"]["residual"].double().reshape(came_in[name].shape)
            dist.all_reduce(left)
            torch.testing.assert_close(arrived[name] + left, came_in[name], rtol=0, atol=1e-5)
