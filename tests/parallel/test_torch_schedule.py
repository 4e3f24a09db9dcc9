"""Test plans and ``schedule="auto"`` with stock Horovod and PyTorch, on 2 and 3 ranks."""

from launch import scenario_tests

reports, test_scenario = scenario_tests(
    "torch_schedule.py",
    "torch_auto_optimizers.py",
    "torch_given_plans.py",
    "torch_planned_tables.py",
    "torch_profiles.py",
    "torch_uncompressed.py",
    slow_scenarios=(
        "auto_finds_tables_before_it_plans",
        "auto_starts_again_after_a_rest",
        "auto_starts_again_when_steps_change",
        "optimizers_that_share_auto_and_step_in_another_order_on_each_rank",
        "plans_that_change_while_gradients_of_others_are_in_flight",
        "auto_with_parameters_that_some_ranks_do_not_use",
        "auto_with_tables_that_the_user_names",
        "plans_that_change_in_every_step_leave_tables_out",
        "steps_that_compress_nothing_but_tables",
        "two_compressors_take_turns",
    ),
)
