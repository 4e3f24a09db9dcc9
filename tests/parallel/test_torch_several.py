"""Test several optimizers, hvd.allreduce alone, sparse gradients, commits and costs, with PyTorch.

All scenarios run on 2 ranks. Those in which timing could change the names of collectives also run
on 3 ranks.
"""

from launch import scenario_tests

reports, test_scenario = scenario_tests(
    "torch_several.py",
    "torch_direct.py",
    "torch_commits.py",
    "torch_loss_scale.py",
    "torch_programs.py",
    slow_scenarios=(
        "a_step_that_is_compiled_as_a_whole",
        "skipped_steps_of_several_passes_lose_nothing",
    ),
    on_more_ranks=(
        "names_do_not_depend_on_timing",
        "collectives_of_the_program_after_backward",
        "a_collective_of_the_program_on_a_rank_without_gradients",
        "collectives_without_a_name_anywhere",
    ),
)
