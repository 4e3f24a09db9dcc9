"""Test what must hold on every rank with PyTorch's fully_shard.

Started by test_torch_fsdp.py under torchrun on four ranks: two hosts of two ranks, unless a
scenario says otherwise.
"""

import sys

import fsdp_random
import fsdp_roots
import fsdp_states
from ddp_tools import main


def scenario_random_programs(directory):
    for seed in range(15):
        fsdp_random.run(seed)


def scenario_many_random_programs(directory):
    for seed in range(15, 40):
        fsdp_random.run(seed)


if __name__ == "__main__":
    main({**globals(), **vars(fsdp_states), **vars(fsdp_roots)})
    sys.exit()
