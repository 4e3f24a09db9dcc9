"""Test workers that join, are killed and leave, under the real horovodrun --min-np.

Nothing that memories keep is lost, and training continues.
"""

import pytest
from elastic_job import Job, come_and_go, lose_a_host

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("communicator", "removal"), [("allgather", "without a commit"), ("auto", "after a commit")]
)
def test_ranks_come_and_go(tmp_path, communicator, removal):
    last = come_and_go(Job(tmp_path, "torch_elastic.py", communicator), removal)
    if removal == "without a commit":
        assert last["snapshot"] == 0, "expected all to be as at the last commit"


def test_hierarchical_ranks_join_and_leave(tmp_path):
    """No rank is killed: Horovod itself aborts ranks that share a process set with a killed one."""
    job = Job(tmp_path, "torch_elastic.py", "hierarchical", process_sets=True)
    come_and_go(job, "after a commit", killed=False)


def test_the_copies_of_memories_are_on_another_host(tmp_path):
    lose_a_host(Job(tmp_path, "torch_elastic.py", "allgather"))
