"""PyTorch's fully_shard on two hosts of two ranks, with torchrun and without Horovod."""

import re

import pytest
from launch import scenario_tests
from launch_torchrun import lines_of, torchrun

reports, test_scenario = scenario_tests(
    "fsdp_scenarios.py", "fsdp_states.py", run=torchrun, ranks=(4,), slow_ranks=(),
    slow_scenarios=("many_random_programs",),
)  # fmt: skip

_OTHER_CONFIGURATION = r"expected the same compressor configuration on every rank"


_FAILURES = {
    "other_codec_on_one_rank": rf"{_OTHER_CONFIGURATION}.*codec",
    "other_parameters_on_one_host": r"expected the same gradients in the same step",
    "encoding_that_fails_on_one_rank": (
        r"DeepReduceError: parameter branch.weight: InvalidArgumentError"
    ),
}
_SLOW_FAILURES = {
    "other_dense_below_on_one_host": rf"{_OTHER_CONFIGURATION}.*dense_below",
    "other_groups_on_one_host": rf"{_OTHER_CONFIGURATION}.*parameter groups",
    "other_steps_on_one_rank": r"expected the same gradients in the same step",
    "encoding_that_fails_in_a_thread_of_one_rank": (
        r"DeepReduceError: parameter weight: InvalidArgumentError"
    ),
    "loss_scale_that_fails_on_one_rank": r"no scale today",
}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        *(pytest.param(*case, id=case[0]) for case in _FAILURES.items()),
        *(
            pytest.param(*case, id=case[0], marks=pytest.mark.slow)
            for case in _SLOW_FAILURES.items()
        ),
    ],
)
def test_every_rank_ends_with_the_cause(failure, message):
    finished = torchrun(4, "fsdp_failures.py", failure, timeout=60)
    assert finished.returncode != 0
    assert "went on silently" not in finished.stdout
    for rank in range(4):
        said = lines_of(rank, finished.stdout)
        assert re.search(message, said), f"rank {rank} said:\n{said[-3000:]}"


@pytest.mark.parametrize(
    "failure",
    [pytest.param("exception_on_one_rank", marks=pytest.mark.slow), "rank_that_is_killed"],
)
def test_all_ranks_end_when_one_is_gone(failure):
    finished = torchrun(4, "fsdp_failures.py", failure, timeout=60)
    assert finished.returncode != 0
    assert "went on silently" not in finished.stdout
    said = lines_of(0, finished.stdout)  # in the same host: PyTorch's own collective fails
    assert re.search(r"[Cc]onnection (closed|reset) by peer|the data has ended", said), said[-3000:]
