"""Test what must hold on every rank with PyTorch's fully_shard.

Started by test_torch_fsdp.py under torchrun on four ranks: two hosts of two ranks, unless a
scenario says otherwise.
"""

import itertools
import sys
import warnings

import ddp_loss_scale
import fsdp_misuse
import fsdp_random
import fsdp_roots
import fsdp_states
import random_plans
import torch
import torch.distributed as dist
from ddp_tools import Network, main
from fsdp_tools import meshes, sharded
from torch.distributed.fsdp import fully_shard

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import rows_codec
from deepreduce_hvd.schedule import Message


def scenario_random_programs(directory):
    for seed in range(6):
        fsdp_random.run(seed)


def scenario_many_random_programs(directory):
    for seed in range(6, 40):
        fsdp_random.run(seed)


def scenario_skipped_steps_of_several_passes_lose_nothing(directory):
    skipped = 0
    for seed in range(12):
        build = ddp_loss_scale.fsdp_model(meshes((2, 4, 1)[seed % 3]))
        skipped += ddp_loss_scale.run(seed, build)
    assert skipped


def scenario_hosts_that_begin_with_other_values_are_named(directory):
    for hosts in (2, 4, 1):
        mesh = meshes(hosts)
        for differs in (True, False):
            network = Network()
            with torch.no_grad():
                network.last.bias += differs and mesh.get_local_rank("hosts") == hosts - 1
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sharded(network, mesh)
            texts = [str(one.message) for one in caught if "other values" in str(one.message)]
            first = mesh.get_local_rank("hosts") == 0
            assert bool(texts) == (differs and hosts > 1 and first), (hosts, differs, texts)


def scenario_an_embedding_table_gets_the_codec_rows_or_is_named_where_its_rows_are(directory):
    """A rank looks at its own shard, here 150 of 300 rows. No batch uses rows of the second."""
    mesh = meshes(2)
    first = mesh.get_local_rank("ranks") == 0
    message = Message(("1.weight", "0.weight"), "codec", 0.25, "Allgather")
    plan = random_plans.plan_of([message], 2, repr(dr.recommended_codec()))
    given = (None, None), (dr.recommended_codec(), None), ({"0.*": "rows"}, None), (None, plan)
    # with 70 rows, the second step decides
    for used, (codec, schedule) in itertools.product((9, 70), given):
        network = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
        fully_shard(network, mesh=mesh["ranks"])
        compressor = dr.Compressor(codec, parameters=network.named_parameters(), schedule=schedule)
        compressor.register(network, mesh["hosts"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                network.zero_grad()
                rows = (torch.arange(used) + used * step + dist.get_rank()) % 145
                network(rows).pow(2).sum().backward()
            compressor.state_dict()
        said = [str(one.message) for one in caught if "embedding table" in str(one.message)]
        assert len(said) == (first and isinstance(codec, dr.Codec)), (codec, said)
        assert all('Compressor({"0.weight": "rows"}' in text for text in said), said
        policies, saved = compressor.policies, compressor.state_dict()["parameters"]
        rows = (codec is None and first) or isinstance(codec, dict)
        assert (policies["0.weight"].codec == rows_codec()) == rows, policies
        assert policies["1.weight"].codec == dr.recommended_codec(), policies
        if codec is None:
            assert saved["0.weight"]["is_table"] is (True if first else None)
            assert saved["1.weight"]["is_table"] is False
            if first:
                assert not saved["0.weight"]["memory"]["residual"].any()
            states: list = [None] * dist.get_world_size()
            dist.all_gather_object(states, compressor.state_dict())
            compressor.load_state_dict(states)  # then both shards know what one has seen
            assert compressor.policies["0.weight"].codec == rows_codec()
            network(torch.arange(140, 160) + dist.get_rank()).pow(2).sum().backward()
            del states[2:]  # of one host
            states[1]["parameters"]["0.weight"]["is_table"] = False
            states[1]["size"] = states[0]["size"] = 1
            compressor.load_state_dict(states)  # the shards do not agree
            assert compressor.policies["0.weight"].codec == dr.recommended_codec()
        compressor.close()


def scenario_an_optimizer_may_be_prepared_before_the_model_is_registered(directory):
    """Adam keeps its momentum for embedding tables only, which the registered shards find."""
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam):
        trained = []
        for prepared_first in (True, False):
            torch.manual_seed(0)
            mesh = meshes(2)
            network = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
            fully_shard(network, mesh=mesh["ranks"])
            compressor = dr.Compressor(parameters=network.named_parameters())
            momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            optimizer = kind(network.parameters(), lr=0.01, **momentum)
            if prepared_first:
                dr.prepare(optimizer, compressor)
            compressor.register(network, mesh["hosts"])
            if not prepared_first:
                dr.prepare(optimizer, compressor)
            for step in range(4):
                optimizer.zero_grad()
                rows = (torch.arange(9) + 9 * step + dist.get_rank()) % 145
                network(rows).pow(2).sum().backward()
                if step == 3:
                    compressor.close()  # the rest goes on as it was
                optimizer.step()
            trained.append([one.to_local() for one in network.parameters()])
        for one, two in zip(*trained):
            assert torch.equal(one, two), kind


if __name__ == "__main__":
    main({**globals(), **vars(fsdp_states), **vars(fsdp_roots), **vars(fsdp_misuse)})
    sys.exit()
