"""Test PyTorch's fully_shard on two hosts of two ranks, with torchrun and without Horovod."""

import pytest
from launch import scenario_tests
from launch_torchrun import failure_tests, torchrun

reports, test_scenario = scenario_tests(
    "fsdp_scenarios.py", "fsdp_states.py", "fsdp_roots.py", "fsdp_misuse.py",
    run=torchrun, ranks=(4,), slow_ranks=(),
    slow_scenarios=(
        "gradients_that_are_discarded_are_warned_of", "many_random_programs",
        "dense_is_pytorchs_hybrid_sharding", "skipped_steps_of_several_passes_lose_nothing",
    ),
)  # fmt: skip

_OTHER_CONFIGURATION = r"expected the same compressor configuration on every rank"


said, test_every_rank_ends_with_the_cause = failure_tests(
    "fsdp_failures.py",
    4,
    quick={
        "other_codec_on_one_rank": rf"{_OTHER_CONFIGURATION}.*codec",
        "other_parameters_on_one_host": r"expected the same gradients in the same step",
        "encoding_that_fails_on_one_rank": (
            r"DeepReduceError: parameter branch.weight: InvalidArgumentError"
        ),
    },
    slow={
        "other_dense_below_on_one_host": rf"{_OTHER_CONFIGURATION}.*dense_below",
        "other_groups_on_one_host": rf"{_OTHER_CONFIGURATION}.*parameter groups",
        "other_steps_on_one_rank": r"expected the same gradients in the same step",
        "encoding_that_fails_in_a_thread_of_one_rank": (
            r"DeepReduceError: parameter weight: InvalidArgumentError"
        ),
        "loss_scale_that_fails_on_one_rank": r"no scale today",
        "exception_on_one_rank": r"[Cc]onnection (closed|reset) by peer|the data has ended",
        "rank_that_is_killed": r"[Cc]onnection (closed|reset) by peer",
    },
)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job():
    finished = torchrun(4, "fsdp_failures.py", "rank_that_is_killed", timeout=60)
    assert finished.returncode != 0
    assert "went on silently" not in finished.stdout
