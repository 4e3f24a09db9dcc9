"""Test modules that are called one by one, empty shards, and states of models, with fully_shard.

Run by fsdp_scenarios.py.
"""

import time

import torch
import torch.distributed as dist
from ddp_tools import CODEC, Network, assert_refused
from fsdp_states import force_sums, sum_of_residuals
from fsdp_tools import loss_of, meshes, shard, sharded
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import deepreduce_hvd as dr
from deepreduce_hvd.torch.ddp.buckets import BucketJob


def _sharded(network, calls, **options):
    mesh = meshes(2)
    shard(network, mesh["ranks"], calls)
    compressor = dr.Compressor(
        dr.Codec(dr.TopK(0.25)),
        parameters=network.named_parameters(),
        **{"dense_below": 0, **options},
    )
    compressor.register(network, mesh["hosts"])
    return compressor


def scenario_several_roots(directory):
    """Backward returns after all averages, also if the modules are called one by one.

    PyTorch then ends each of them at the end of the pass. The exchange is made slow, so that an
    average that nobody waits for is missing.
    """
    run = BucketJob.run

    def slow(job):
        time.sleep(0.2)
        return run(job)

    BucketJob.run = slow
    found = []
    try:
        for whole in (True, False):
            torch.manual_seed(0)
            network = torch.nn.Sequential(
                torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 50)
            )
            compressor = _sharded(network, [["0"], ["2"], [""]])
            for step in range(2):
                torch.manual_seed(10 * step + dist.get_rank())
                inputs = torch.randn(8, 30)
                network.zero_grad()
                outputs = network(inputs) if whole else network[2](network[1](network[0](inputs)))
                outputs.square().mean().backward()
                gradients = [one.grad.to_local().clone() for one in network.parameters()]
            found.append(gradients)
            assert {row["steps"] for row in compressor.stats().values()} == {2}
    finally:
        BucketJob.run = run
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def scenario_empty_shards_resume_with_a_loss_scale(directory):
    states = []
    for turn in range(2):
        torch.manual_seed(0)
        # the second rank of a host has no row of the first layer
        network = torch.nn.Sequential(torch.nn.Linear(500, 1), torch.nn.Linear(1, 400))
        compressor = _sharded(network, [[""]], loss_scale=lambda: 1024.0)
        if turn:
            compressor.load_state_dict(states)
        network(torch.randn(4, 500)).square().mean().backward()
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, compressor.state_dict())
        assert {row["steps"] for row in compressor.stats().values()} == {turn + 1}


def scenario_whole_parameters_after_a_forward_pass_are_refused(directory):
    """PyTorch keeps those of the root, and of layers with reshard_after_forward=False."""
    mesh = meshes(2)
    for options in ({}, {"reshard_after_forward": False}):
        network = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 40))
        fully_shard(network[0], mesh=mesh["ranks"], **options)
        fully_shard(network, mesh=mesh["ranks"])
        with torch.no_grad():
            network(torch.randn(2, 20))
        whole = dr.Compressor(parameters=network.named_parameters())
        network.reshard()
        network[0].reshard()
        assert_refused(
            "got a weight that is whole since a forward pass",
            lambda one=whole: one.register(network, mesh["hosts"]),
        )
        compressor = dr.Compressor(parameters=network.named_parameters())
        compressor.register(network, mesh["hosts"])
        network(torch.randn(2, 20)).square().mean().backward()
        assert {row["steps"] for row in compressor.stats().values()} == {1}


def scenario_whole_states_of_model_and_optimizer(directory):
    """As docs/tutorial-fsdp.md says: saved on rank 0, and loaded on all ranks."""
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # parameters that SGD steps without momentum have no state
    incomplete = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
    path, found = directory / "whole.pt", []
    for turn in range(2):
        torch.manual_seed(turn)
        network = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 40))
        # PyTorch refuses a state without tensors, which SGD without momentum has
        compressor = _sharded(network, [["0"], [""]], dense_below=1024)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        optimizer = dr.prepare(optimizer, compressor)
        if turn:
            saved = torch.load(path, weights_only=True)
            state_dict.set_model_state_dict(network, saved["model"], options=options)
            state_dict.set_optimizer_state_dict(
                network, optimizer, saved["optimizer"], options=incomplete
            )
            assert optimizer.param_groups[0]["lr"] == 0.1
        else:
            network(torch.randn(4, 60)).square().mean().backward()
            optimizer.step()
            saved = {
                "model": state_dict.get_model_state_dict(network, options=options),
                "optimizer": state_dict.get_optimizer_state_dict(
                    network, optimizer, options=options
                ),
            }
            if dist.get_rank() == 0:
                torch.save(saved, path)
            dist.barrier()
        found.append([one.full_tensor() for one in network.parameters()])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def scenario_register_another_compressor_after_close(directory):
    mesh, network = meshes(2), Network()
    closed = sharded(network, mesh)
    for number in range(2):
        loss_of(network, 0, dist.get_rank()).backward()
        closed.close()
        compressor = dr.Compressor(CODEC, parameters=network.named_parameters(), dense_below=200)
        compressor.register(network, mesh["hosts"])
        other = Network()
        sharded(other, mesh, CODEC)
        for step in range(1, 3):
            for one in (network, other):
                one.zero_grad()
                loss_of(one, step, dist.get_rank()).backward()
            for (name, own), fresh in zip(network.named_parameters(), other.parameters()):
                own, fresh = own.grad.to_local(), fresh.grad.to_local()
                assert torch.equal(own, fresh), f"{number}, step {step}, {name}"
        closed = compressor
    third = dr.Compressor(CODEC, parameters=network.named_parameters())
    assert_refused("got one that has a hook", lambda: third.register(network, mesh["hosts"]))


def scenario_other_numbers_of_shards_keep_the_update_if_it_is_divided_later(directory):
    """PyTorch divides after the exchange, by a number that depends on the number of shards."""
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)

    def backward(network):
        network.zero_grad()
        (loss_of(network, 0, 0) * 64).backward()  # the same on all ranks
        return {name: one.grad.full_tensor() for name, one in network.named_parameters()}

    def unsent(compressor, mesh):
        slots, hosts = compressor.adapter.slots, mesh["hosts"].size()
        return {
            name: total / hosts / slots[name].divided_after
            for name, total in sum_of_residuals(compressor, mesh).items()
        }

    for sums, policy in ((True, None), (False, half), (True, half)):
        states = None
        for hosts in (2, 1, 4, 2):
            mesh, network = meshes(hosts), Network()
            compressor = sharded(network, mesh, CODEC, policy=policy)
            if sums:
                force_sums(network)
            if states is not None:
                compressor.load_state_dict(states)
            sent = backward(network)
            left = unsent(compressor, mesh)
            total = {name: sent[name].double() + one for name, one in left.items()}
            if states is None:
                states = [None] * dist.get_world_size()
                dist.all_gather_object(states, compressor.state_dict())
                expected = {name: one + left[name] for name, one in total.items()}
                assert all(one.any() for one in left.values())
            else:
                for name, one in expected.items():
                    near = 1e-2 * float(one.abs().max())
                    what = f"{sums} {policy}, {hosts} hosts, {name}"
                    torch.testing.assert_close(total[name], one, rtol=0, atol=near, msg=what)
