"""Test a rank that hangs.

The others say whom they wait for. With the settings of docs/troubleshooting.md, they end.
"""

import pytest
from test_rank_failures import _SILENT, IN_ROUNDS, TENSORFLOW, TORCH, expect_to_say

_LAST = r"expected all \d ranks to continue, got rank {last} last heard of elsewhere"
_WAITS = {
    TORCH: (
        r"has waited \d+ s for (the gradient of|the exchange deepreduce\.0\.) .*, at "
        r".*torch_rank_failures\.py:\d+ in main, in step 7"
    ),
    TENSORFLOW: (
        r"has waited \d+ s for the TensorFlow function train_step, at "
        r".*tensorflow_rank_failures\.py:\d+ in main, in step"
    ),
    IN_ROUNDS: (
        r"has waited \d+ s for (the exchange deepreduce\.0\.|the TensorFlow function "
        r"train_step)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "ranks"), [(TORCH, 3), (TENSORFLOW, 2), (IN_ROUNDS, 2)])
def test_a_stopped_process(worker, ranks):
    """Gloo's time-out ends the job."""
    expect_to_say(
        worker, ranks, "stopped", _WAITS[worker], r"Nothing is heard from rank {last}:", _SILENT,
        HOROVOD_GLOO_TIMEOUT_SECONDS="10", HOROVOD_STALL_CHECK_TIME_SECONDS="2",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "ranks"), [(TORCH, 2), (TENSORFLOW, 2), (IN_ROUNDS, 2)])
def test_a_program_that_does_not_go_on(worker, ranks):
    """Horovod's threads in the process still answer, so only the stall time-out ends the job."""
    asleep = (
        r"ank {last} is elsewhere at .*rank_failures\.py:\d+ in load_for_ever in step 6, for \d+ s"
    )
    expect_to_say(
        worker,
        ranks,
        "asleep",
        _WAITS[worker],
        asleep,
        _LAST,
        HOROVOD_STALL_CHECK_TIME_SECONDS="3",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="8",
    )


@pytest.mark.slow
def test_collectives_without_a_name_that_never_match():
    """They match by number. The last one of a rank that starts an extra one never matches."""
    expect_to_say(
        TORCH, 2, "counts other collectives",
        r"has waited \d+ s for the gradient of .*, at .*torch_rank_failures\.py:\d+ in main, in step",
        r"Rank {last} is waiting for hvd\.allreduce number \d+ \(without a name, .* it a name\)",
        r"all 2 ranks are alive",
        HOROVOD_STALL_CHECK_TIME_SECONDS="3", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="8",
    )  # fmt: skip
