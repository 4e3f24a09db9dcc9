"""Several optimizers, hvd.allreduce alone, sparse gradients, costs: PyTorch on 2 ranks, and on 3
where names of collectives depend on timing.
"""

from launch import scenario_tests

reports, test_scenario = scenario_tests(
    "torch_several.py",
    "torch_direct.py",
    on_more_ranks=(
        "names_do_not_depend_on_timing",
        "collectives_of_the_program_after_backward",
        "a_collective_of_the_program_on_a_rank_without_gradients",
    ),
)
