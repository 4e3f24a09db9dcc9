"""Test states that are loaded into compressors of elastic training."""

import pytest
from elastic_ranks import Job, Worker
from test_elastic import reduction, trained  # noqa: F401

from deepreduce_hvd.checkpoints import checkpoint


def test_a_failure_before_the_first_commit():
    """A job that goes on from a file has residuals before its first ``sync``."""
    job = Job(2, begins_at=3)
    assert job.moments[3].any()
    job.fail()
    job.expect_moment(3)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_reduction_that_rank_0_does_not_know(loaded):
    """On TensorFlow, ranks know it after they have traced a step."""
    job = trained(2)
    for slot in job.workers[0].slots.values():
        slot.reduction = None
    if loaded:
        state = job.workers[1].state_dict()
        for part in state["parameters"].values():
            part["reduction"] = None
        worker = job.workers[1]
        checkpoint.load(worker.slots, state, worker.configuration, 1, 2)
    job.expect_success("sync")
    assert {slot.reduction for slot in job.workers[1].slots.values()} == {Worker.reduction}
