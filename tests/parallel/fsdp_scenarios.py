"""Test what must hold on every rank with PyTorch's fully_shard.

Started by test_torch_fsdp.py under torchrun on four ranks: two hosts of two ranks, unless a
scenario says otherwise.
"""

import sys
import warnings

import ddp_loss_scale
import fsdp_random
import fsdp_roots
import fsdp_states
import torch
import torch.distributed as dist
from ddp_tools import main
from fsdp_tools import meshes
from torch.distributed.fsdp import fully_shard

import deepreduce_hvd as dr


def scenario_random_programs(directory):
    for seed in range(15):
        fsdp_random.run(seed)


def scenario_many_random_programs(directory):
    for seed in range(15, 40):
        fsdp_random.run(seed)


def scenario_skipped_steps_of_several_passes_lose_nothing(directory):
    skipped = 0
    for seed in range(12):
        build = ddp_loss_scale.fsdp_model(meshes((2, 4, 1)[seed % 3]))
        skipped += ddp_loss_scale.run(seed, build)
    assert skipped


def scenario_an_embedding_table_is_named_where_its_rows_are(directory):
    """A rank looks at its own shard, here 150 of 300 rows. No batch uses rows of the second."""
    mesh = meshes(2)
    for codec, tables in ((None, 1 - mesh.get_local_rank("ranks")), ({"0.*": "rows"}, 0)):
        network = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
        fully_shard(network, mesh=mesh["ranks"])
        compressor = dr.Compressor(codec, parameters=network.named_parameters())
        compressor.register(network, mesh["hosts"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                network.zero_grad()
                network(torch.arange(9) + dist.get_rank()).pow(2).sum().backward()
            compressor.state_dict()
        said = [str(one.message) for one in caught if "embedding table" in str(one.message)]
        assert len(said) == tables, (codec, said)
        assert all('Compressor({"0.weight": "rows"}' in text for text in said), said
        compressor.close()


if __name__ == "__main__":
    main({**globals(), **vars(fsdp_states), **vars(fsdp_roots)})
    sys.exit()
