"""Test stock Horovod and PyTorch on 2 and 3 ranks, with horovodrun."""

from launch import failure_test, scenario_tests, scenarios

reports, test_scenario = scenario_tests(
    "torch_scenarios.py",
    "torch_prepared.py",
    "torch_states.py",
    "torch_refusals.py",
    "torch_tables.py",
    "torch_table_warnings.py",
    "torch_misuse.py",
    slow_scenarios=(
        "every_codec_with_every_memory",
        *scenarios("torch_misuse.py"),
        *scenarios("torch_refusals.py"),
        *scenarios("torch_table_warnings.py"),
    ),
    on_every_number=("states_of_another_world_size",),
)

test_failure_ends_the_job_with_a_message_on_every_rank = failure_test(
    "torch_failures.py",
    quick={
        "bad_gradient_type_on_one_rank": (
            r"rank 1: InvalidArgumentError: gradient: expected torch\.float32, .*, got "
            r"torch\.complex64"
        ),
        "other_codec_on_one_rank": r"expected the same compressor configuration on every rank",
    },
    # a separate job, because compressors of scenarios leave process sets of one rank behind
    slow={
        "other_process_set": (
            r"expected Horovod to sum or average over the 1 ranks of the compressor's process set"
        )
    },
)
