"""Run random programs on stock Horovod and PyTorch, against an oracle that knows all ranks."""

from pathlib import Path

import pytest
import sampling
import torch_generator
from launch import horovodrun, shown

WALK = Path(__file__).with_name("torch_walk.py")
#: seeds of the slow programs on 2 and on 3 ranks; fewer with --one-in
_SEEDS = ("8-59", "1000-1039") if sampling.one_in == 1 else ("8-39", "1000-1019")


def test_memories_are_looked_at_after_the_last_step():
    programs = [torch_generator.make(seed, 2, steps) for seed in range(20) for steps in (None, 3)]
    assert all(program.steps[-1].look for program in programs)


@pytest.mark.parametrize(
    ("processes", "seeds"),
    [
        (2, "0-7"),
        pytest.param(2, _SEEDS[0], marks=pytest.mark.slow),
        pytest.param(3, _SEEDS[1], marks=pytest.mark.slow),
    ],
)
def test_random_programs_come_to_what_the_oracle_says(processes, seeds):
    finished = horovodrun(processes, WALK, "--seeds", seeds, timeout=600)
    assert finished.returncode == 0, shown(finished.stdout)
    assert f"seeds on {processes} ranks" in finished.stdout
