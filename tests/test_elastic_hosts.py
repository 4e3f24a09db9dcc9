"""Test that memories outlive a host of several ranks in elastic training."""

import numpy as np
import pytest
from elastic_ranks import Job, Worker
from test_elastic import reduction  # noqa: F401
from threaded_ranks import Group, Lost, ThreadedTransport, on_all

from deepreduce_hvd.coordination.memory_transfer import distance_between_hosts
from deepreduce_hvd.errors import CorruptPayloadError


class HostsJob(Job):
    """A job with a commit after 3 steps, and some more steps.

    Args:
        counts: number of ranks on each host.
        steps_since: number of steps after the commit.
    """

    def __init__(self, counts, steps_since=2):
        super().__init__(sum(counts))
        self.hosts = [number for number, count in enumerate(counts) for _ in range(count)]
        for worker, host in zip(self.workers, self.hosts):
            worker.host = host
        self.form()
        self.expect_success("sync")
        self.step(3)
        self.expect_success("save")
        self.at_commit = [worker.kept.copy() for worker in self.workers]
        self.step(steps_since)

    def lose_host(self, host):
        self.lose(*[rank for rank, worker in enumerate(self.workers) if worker.host == host])


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (2, 2, 2), (1, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("host", [0, 1, -1])
def test_a_host_that_fails(counts, host):
    job = HostsJob(counts)
    job.lose_host(host % len(counts))
    job.fail()
    job.expect_moment(3)


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_is_removed_after_a_commit(host):
    job = HostsJob((2, 2), steps_since=0)
    job.lose_host(host)
    job.form()
    job.step()  # this takes over the memories: Horovod calls nothing
    job.lose(0)
    job.fail()
    job.expect_kept(job.moments[3])


def test_hosts_that_fail_one_after_another():
    job = HostsJob((2, 2, 2))
    for host in (1, 0):
        job.lose_host(host)
        job.fail()
        job.expect_moment(job.workers[0].model)
        job.step()


def test_hosts_that_join():
    """The copies are then so far that no rank has its own on its host."""
    job = HostsJob((2, 2))
    for number in range(3):
        job.workers.append(Worker(7 + number))
        job.workers[-1].host = 2
    job.form()
    job.expect_success("sync")
    job.step()
    job.expect_success("save")
    job.lose_host(2)
    job.fail()
    job.expect_moment(6)


@pytest.mark.parametrize(
    ("counts", "host", "gone"),
    [
        ((1, 2), 0, []),
        ((1, 2), 1, [1]),
        ((3, 1), 0, [0, 1]),
        ((3, 1), 1, []),
        ((5, 1, 1), 0, [0, 1, 2]),
        ((2, 5), 1, [2, 3, 4]),
    ],
)
def test_hosts_that_have_more_ranks_than_all_others(counts, host, gone):
    """As many memories are kept as the other hosts have ranks."""
    job = HostsJob(counts)
    job.lose_host(host)
    for worker in job.workers:
        worker.restore()
    job.form()
    if gone:
        with pytest.warns(UserWarning, match="lost together with the ranks that had") as caught:
            outcomes = on_all(job.group, [worker.keeper.sync for worker in job.workers])
        assert f"ranks {gone} were lost" in str(caught[0].message)
        assert outcomes == [None] * len(job.workers)
    else:
        job.expect_success("sync")
    kept = sum(memory for rank, memory in enumerate(job.at_commit) if rank not in gone)
    job.expect_kept(kept if Worker.reduction == "sum" else kept / sum(counts))


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("part", ["hosts", "copies.0"])
@pytest.mark.parametrize("cut_off", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_a_host_that_fails_during_a_commit(host, part, cut_off):
    job = HostsJob((2, 2))
    job.form({(rank, f"deepreduce.elastic.{part}") for rank in cut_off})
    outcomes = job.call("save")
    left = [outcome for worker, outcome in zip(job.workers, outcomes) if worker.host != host]
    job.lose_host(host)
    job.fail()
    agreed = 5 if left[0] is None else 3
    assert job.workers[0].model == agreed
    # the other case warns, and continues from the previous commit
    if agreed == 3 or left == [None] * 2:
        job.expect_moment(agreed)


def test_a_previous_copy_of_another_rank_is_not_used():
    """The ranks are on other hosts now, so rank 2 has a copy of rank 1, and not of rank 0."""
    job = HostsJob((2, 2))
    for worker in job.workers:
        worker.host = object()
    job.form({(2, "deepreduce.elastic.copies.0")})
    assert [type(outcome) for outcome in job.call("save")] == [type(None)] * 2 + [Lost, type(None)]
    kept = sum(worker.kept for rank, worker in enumerate(job.workers) if rank != 1)
    job.lose(1)
    for worker in job.workers:
        worker.restore()
    job.form()
    with pytest.warns(UserWarning, match="rank 1 was lost during a commit; its memory is lost"):
        on_all(job.group, [worker.keeper.sync for worker in job.workers])
    job.expect_kept(kept if Worker.reduction == "sum" else kept / 4)


def on_own_host(local_sizes, distance):
    """Count the ranks whose copy is on their own host."""
    hosts = []
    while len(hosts) < len(local_sizes):
        hosts += [len(hosts)] * local_sizes[len(hosts)]
    return sum(hosts[rank] == host for rank, host in enumerate(hosts[distance:] + hosts[:distance]))


@pytest.mark.parametrize("most", [1, 2, 5, 12])
def test_the_distance_is_the_best_one(most):
    random = np.random.default_rng(most)
    for _ in range(300):
        counts = random.integers(1, most + 1, random.integers(1, 7)).tolist()
        local_sizes = [count for count in counts for _ in range(count)]
        distances = range(1, max(len(local_sizes), 2))
        expected = min(distances, key=lambda distance: on_own_host(local_sizes, distance))
        assert distance_between_hosts(local_sizes) == expected, counts


@pytest.mark.parametrize("hosts", [2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_equal_hosts_have_no_copies_of_their_own(hosts, ranks):
    local_sizes = [ranks] * ranks * hosts
    assert distance_between_hosts(local_sizes) == ranks
    assert on_own_host(local_sizes, ranks) == 0


@pytest.mark.parametrize("count", [0, -1, 3, 1 << 40])
def test_numbers_of_ranks_that_no_host_has(count):
    job = Job(2)
    job.workers[1].transport.local_size = count
    for outcome in job.call("save"):
        assert isinstance(outcome, CorruptPayloadError)
        assert f"the number of ranks on its host, 1 to 2, got [1, {count}]" in str(outcome)


def test_distances_that_differ():
    class Lying(ThreadedTransport):
        def allgather(self, array, name):
            if name == "deepreduce.elastic.statuses":
                array.view(np.int64)[7] = 2
            return super().allgather(array, name)

    job = HostsJob((1, 1, 1))
    job.group = Group(3)
    for rank, worker in enumerate(job.workers):
        worker.transport = (Lying if rank else ThreadedTransport)(job.group, rank)
    for outcome in job.call("sync"):
        assert isinstance(outcome, CorruptPayloadError) and not isinstance(outcome, Lost)
        assert "expected one distance of the copies of commit" in str(outcome)
        assert "got [1, 2]" in str(outcome)
