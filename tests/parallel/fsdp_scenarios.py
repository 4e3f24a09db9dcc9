"""Test what must hold on every rank with PyTorch's fully_shard.

Started by test_torch_fsdp.py under torchrun on four ranks: two hosts of two ranks, unless a
scenario says otherwise.
"""

import sys

import ddp_loss_scale
import fsdp_random
import fsdp_roots
import fsdp_states
from ddp_tools import main
from fsdp_tools import meshes


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


if __name__ == "__main__":
    main({**globals(), **vars(fsdp_states), **vars(fsdp_roots)})
    sys.exit()
