"""Test workers that join, are killed and leave, under the real horovodrun --min-np.

Nothing that memories keep is lost, and training continues.
"""

import pytest
from elastic_job import Job, come_and_go

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("communicator", "removal"), [("allgather", "without a commit"), ("auto", "after a commit")]
)
def test_ranks_come_and_go(tmp_path, communicator, removal):
    def start(directory):
        return Job(directory, "torch_elastic.py", communicator)

    last = come_and_go(tmp_path, start, removal)
    if removal == "without a commit":
        assert last["snapshot"] == 0, "expected all to be as at the last commit"


def test_hierarchical_ranks_join_and_leave(tmp_path):
    """No rank is killed: Horovod itself aborts ranks that share a process set with a killed one."""

    def start(directory):
        return Job(directory, "torch_elastic.py", "hierarchical", process_sets=True)

    come_and_go(tmp_path, start, "after a commit", killed=False)
