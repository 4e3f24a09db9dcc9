"""Warnings about programs whose gradients hosts do not exchange, with PyTorch's fully_shard.

Run by fsdp_scenarios.py.
"""

import random
import re
import warnings

import torch
import torch.distributed as dist
from ddp_tools import Network, discarding_program
from fsdp_tools import LAYERS, WHOLE, loss_of, meshes, shard, sharded
from scenario_runner import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import deepreduce_hvd as dr


def _warned(network, optimizers, steps=3):
    """Return the warnings of this package about gradients that were not exchanged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(network, step, dist.get_rank()).backward()
            for optimizer in optimizers:
                optimizer.step()
    return [str(one.message) for one in caught if "did not exchange" in str(one.message)]


def _hosts_are_equal(network, mesh):
    own = torch.cat([one.detach().to_local().flatten() for one in network.parameters()])
    others = [torch.empty_like(own) for _ in range(mesh["hosts"].size())]
    dist.all_gather(others, own, group=mesh["hosts"].get_group())
    return all(torch.equal(own, other) for other in others)


def scenario_register_that_is_forgotten_is_named(directory):
    for hosts in (2, 4, 1):
        mesh = meshes(hosts)
        network = Network()
        shard(network, mesh["ranks"])
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=200)
        texts = _warned(network, [torch.optim.SGD(network.parameters(), lr=0.1)])
        # compressors of other scenarios may tell it too
        texts = [text for text in texts if "is not registered with a model" in text]
        assert len(texts) == (hosts > 1), texts
        assert _hosts_are_equal(network, mesh) == (hosts == 1)
        if hosts > 1:
            assert "convolution.weight" in texts[0] and 'mesh["hosts"]' in texts[0], texts
        compressor.close()


def scenario_modules_that_are_not_registered_are_named(directory):
    for hosts in (2, 4, 1):
        mesh = meshes(hosts)
        network = Network()
        for part in (network.first, network.last, network.convolution, network.branch):
            fully_shard(part, mesh=mesh["ranks"])
        registered = [network.first, network.last, network.branch]
        compressors = []
        for part in registered:
            compressors.append(dr.Compressor(parameters=part.named_parameters(), dense_below=50))
            compressors[-1].register(part, mesh["hosts"])
        texts = _warned(network, [torch.optim.SGD(network.parameters(), lr=0.1)])
        assert _hosts_are_equal(network, mesh) == (hosts == 1)
        assert len(texts) == (hosts > 1), texts
        for text in texts:
            found = re.findall(r'params"\]\[(\d+)\]', text)
            assert found == ["0", "1"], text  # the convolution has the first two parameters
        for compressor in compressors:
            compressor.close()


def scenario_layers_that_are_added_after_register_are_named(directory):
    mesh = meshes(2)
    network = Network()
    compressor = sharded(network, mesh, calls=WHOLE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    assert _warned(network, [optimizer]) == []
    network.last = torch.nn.Sequential(network.last, torch.nn.Linear(3, 3))
    fully_shard(network.last[1], mesh=mesh["ranks"])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    (text,) = _warned(network, [optimizer])
    assert len(re.findall(r"param_groups", text)) == 2, text
    compressor.close()


def scenario_plain_layers_that_are_added_after_register_are_named(directory):
    """Random programs: ignored parameters, layers that are added, optimizers of some parameters."""
    outcomes = set()
    for seed in range(16):
        draw = random.Random(seed)
        mesh = meshes(draw.choice((1, 2, 2, 4)))
        network = Network()
        ignored = set(network.branch.parameters()) if draw.random() < 0.5 else set()
        shard(network, mesh["ranks"], draw.choice((LAYERS, WHOLE)), ignored_params=ignored)
        compressor = dr.Compressor(
            parameters=[pair for pair in network.named_parameters() if pair[1] not in ignored],
            dense_below=200,
        )
        compressor.register(network, mesh["hosts"])
        first = list(network.parameters())
        assert _warned(network, [torch.optim.SGD(first, lr=0.01)]) == []
        way = draw.choice(("layer", "parameter", "none"))
        if way == "layer":
            network.last = torch.nn.Sequential(network.last, torch.nn.Linear(3, 3))
        elif way == "parameter":
            network.last.gain = torch.nn.Parameter(torch.ones(3))
            network.last.register_forward_hook(lambda layer, inputs, output: output * layer.gain)
        steps = draw.random() < 0.7  # whether an optimizer steps what was added
        owned = list(network.parameters()) if steps else first
        texts = _warned(network, [torch.optim.SGD(owned, lr=0.01)])
        named = way != "none" and steps and mesh["hosts"].size() > 1
        assert len(texts) == named, (seed, way, texts)
        names = {"layer": "of last.1.weight, last.1.bias that", "parameter": "of last.gain that"}
        assert not named or names[way] in texts[0], (seed, texts)
        outcomes.add((way, named, bool(ignored)))
        compressor.close()
    assert len(outcomes) > 5, outcomes


def scenario_pipeline_stages_are_refused(directory):
    """Two stages on two hosts each. PyTorch reduces gradients after the backward passes."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stages", "hosts", "ranks"))
    stage = mesh.get_local_rank("stages")
    network = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Tanh())
    fully_shard(network, mesh=mesh["ranks"])
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
    compressor.register(network, mesh["hosts"])
    group = mesh["stages"].get_group()
    pipeline = ScheduleGPipe(
        PipelineStage(network, stage, 2, torch.device("cpu"), group=group),
        n_microbatches=2,
        loss_fn=torch.nn.functional.mse_loss,
    )
    with refused("expected gradients that are reduced in a backward pass.* PipelineStage"):
        if stage == 0:
            pipeline.step(torch.randn(4, 20))
        else:
            pipeline.step(target=torch.zeros(4, 20))
    compressor.close()


def scenario_parameters_that_are_replaced_after_register_are_refused(directory):
    mesh = meshes(2)
    network = Network()
    compressor = sharded(network, mesh)
    loss_of(network, 0, dist.get_rank()).backward()
    network.load_state_dict(
        {name: value.detach().clone() for name, value in network.state_dict().items()}, assign=True
    )
    with refused(r"expected the parameters of register\(\), got another .*load before you create"):
        loss_of(network, 1, dist.get_rank()).backward()
    compressor.close()


def scenario_whole_shapes_that_differ_between_hosts_are_refused_on_all_ranks(directory):
    mesh = meshes(2)
    wide = mesh.get_local_rank("hosts")
    network = torch.nn.Sequential(torch.nn.Linear(20, 51 + wide))
    fully_shard(network, mesh=mesh["ranks"])
    compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=0)
    with refused("expected the same compressor configuration on every rank"):
        compressor.register(network, mesh["hosts"])


def scenario_gradients_that_are_discarded_are_warned_of(directory):
    """Random programs step, discard what they got, or add more to it."""
    outcomes = set()
    for seed in range(16):
        draw = random.Random(seed)
        mesh = meshes(draw.choice((1, 2, 4)))
        hosts, scales = mesh["hosts"].size(), draw.random() < 0.4
        network = Network()
        compressor = sharded(
            network, mesh, calls=draw.choice((LAYERS, WHOLE)),
            loss_scale=(lambda: 1.0) if scales else None,
        )  # fmt: skip
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        discarded, said = discarding_program(
            draw,
            optimizer,
            lambda step, network=network: loss_of(network, step, dist.get_rank()).backward(),
        )
        assert len(said) == (discarded and not scales and hosts > 1), f"seed {seed}: {said}"
        outcomes.add((discarded, scales, hosts > 1))
        compressor.close()
    assert len(outcomes) > 5, outcomes
