"""PyTorch's DDP on 2 and 3 ranks, with torchrun and without Horovod."""

from launch import scenario_tests
from launch_torchrun import torchrun

reports, test_scenario = scenario_tests(
    "ddp_scenarios.py", run=torchrun, slow_scenarios=("many_random_programs",)
)
