"""Test memories in elastic training, when ranks join and leave.

In all cases, the update that waits in them belongs to the point from which training continues. It
is their sum over all ranks, or their mean if gradients are averaged.
"""

import functools

import numpy as np
import pytest
from elastic_ranks import Job, Worker
from threaded_ranks import Lost, ThreadedTransport, on_all

from deepreduce_hvd.checkpoints.configuration import Configuration
from deepreduce_hvd.coordination.elastic import save_together
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError


@pytest.fixture(autouse=True, params=["sum", "average"])
def reduction(request, monkeypatch):
    monkeypatch.setattr(Worker, "reduction", request.param)


def trained(size, steps_since=2):
    """Return a job with a commit after 3 steps, and some more steps."""
    job = Job(size)
    job.step(3)
    job.expect_success("save")
    job.step(steps_since)
    return job


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("victim", [0, 1, -1])
def test_a_killed_rank(size, victim):
    job = trained(size)
    job.lose(victim % size)
    job.fail()
    job.expect_moment(3)


def test_ranks_that_leave_right_after_a_commit():
    job = trained(3, steps_since=0)
    job.lose(1)
    job.form()
    job.step()  # this restores the memories: Horovod calls nothing
    assert [worker.model for worker in job.workers] == [4, 4]
    job.lose(0)
    job.fail()
    assert job.workers[0].model == 3
    job.expect_kept(job.moments[3])


@pytest.mark.parametrize("action", ["step", "save", "sync"])
def test_ranks_that_leave_without_a_commit(action):
    """No rank has their memories since the commit, so all ranks go back to it."""
    job = trained(3)
    job.lose(1)
    job.form()
    outcomes = job.call(action)
    assert [type(outcome) for outcome in outcomes] == [Lost, Lost]
    assert "ranks [1] left without a commit" in str(outcomes[0])
    job.fail()
    job.expect_moment(3)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("steps_since", [0, 2])
def test_ranks_that_join(steps_since, loaded):
    """A script that loads the state of an earlier job does so in each process that begins."""
    job = trained(2, steps_since)
    job.workers += [Worker(7), Worker(8)]
    if loaded:
        for worker in job.workers[2:]:
            worker.kept_in_a_step(worker.random)
    job.form()
    job.expect_success("sync")
    job.expect_moment(3 + steps_since)


def joined(steps_since):
    """Return a job of two that a rank has joined after steps without a commit."""
    job = trained(2)
    job.workers.append(Worker(7))
    job.form()
    job.expect_success("sync")
    job.step(steps_since)
    return job


@pytest.fixture
def saved_in_save_only(monkeypatch):
    monkeypatch.setattr(Worker, "saves_in_sync", False)


@pytest.mark.parametrize("sent_to", [(), (0,), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_model_that_is_lost_when_ranks_join(sent_to, victim):
    """The ranks ``sent_to`` have synchronized the model too, when the failure comes."""
    job = trained(2)
    job.workers.append(Worker(7))
    job.form()
    assert job.call("sync") == [None] * 3
    for rank in sent_to:
        job.workers[rank].synced(5)
    job.lose(victim)
    root = min({0, 1, 2} - {victim})
    job.fail()
    job.expect_moment(5 if root in sent_to else 3)


@pytest.mark.usefixtures("saved_in_save_only")
@pytest.mark.parametrize("steps_since", [0, 1, 3])
@pytest.mark.parametrize("victim", [0, 1, 2, None])
def test_a_failure_after_ranks_have_joined_without_a_commit(steps_since, victim):
    job = joined(steps_since)
    if victim is not None:
        job.lose(victim)
    job.fail()
    job.expect_moment(3)


@pytest.mark.usefixtures("saved_in_save_only")
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("action", ["step", "save", "sync"])
def test_ranks_that_leave_after_ranks_have_joined_without_a_commit(action, victim):
    job = joined(steps_since=2)
    job.lose(victim)
    job.form()
    assert [type(outcome) for outcome in job.call(action)] == [Lost, Lost]
    job.fail()
    job.expect_moment(3)


@pytest.mark.usefixtures("saved_in_save_only")
@pytest.mark.parametrize("steps_since", [0, 2])
def test_ranks_that_join_again_and_again_without_a_commit(steps_since):
    job = joined(steps_since)
    job.workers += [Worker(8), Worker(9)]
    job.form()
    job.expect_success("sync")
    job.expect_moment(5 + steps_since)


def _expect_one_commit_after_a_loss(job, cut_off, victim, newest):
    """Commit step ``newest`` after step 3, cut some ranks off, lose one, and check the rest."""
    job.form({(rank, "deepreduce.elastic.copies.0") for rank in cut_off})
    outcomes = job.call("save")
    agreed = newest if outcomes[min({0, 1, 2} - {victim})] is None else 3
    job.lose(victim)
    with_copy = (victim + 1) % 3
    job.fail()
    assert job.workers[0].model == agreed
    # the other case warns, and continues from the previous commit
    if agreed == 3 or outcomes[with_copy] is None:
        job.expect_moment(agreed)


@pytest.mark.usefixtures("saved_in_save_only")
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("cut_off", [(0,), (1, 2), (0, 1, 2)])
def test_the_first_commit_after_ranks_have_joined(cut_off, victim):
    job = joined(steps_since=2)
    _expect_one_commit_after_a_loss(job, cut_off, victim, 7)


def test_ranks_that_join_while_others_leave():
    job = trained(3)
    job.lose(2)
    job.workers.append(Worker(7))
    job.form()
    assert {type(outcome) for outcome in job.call("sync")} == {Lost}
    job.fail()
    job.expect_moment(3)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_went_back_alone_takes_the_others_along(leaves):
    """One rank may see a failure while the others see a change of hosts."""
    job = trained(3)
    job.workers[1].restore()
    if leaves:
        job.lose(0)
    job.form()
    assert {
        type(outcome) for outcome in job.call("sync", ["sync", "step"] if leaves else None)
    } == {Lost}
    job.fail()
    job.expect_moment(3)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_steps_after_the_program_went_back(commits, joins, steps):
    """The program may call ``restore`` itself, to undo a bad batch."""
    job = trained(3)
    for worker in job.workers:
        worker.restore()
    job.expect_kept(job.moments[3])
    job.step(steps)
    if commits:
        job.expect_success("save")
        job.step(steps)
    model, kept = job.workers[0].model, job.kept()
    if joins:
        job.workers.append(Worker(7))
        job.form()
    job.expect_success("sync")
    assert [worker.model for worker in job.workers] == [model] * len(job.workers)
    job.expect_kept(kept)
    job.step(2)
    job.expect_success("save")
    job.step(1)
    job.fail()
    job.expect_moment(model + 2)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("cut_off", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_a_commit_that_is_complete_on_some_ranks_only(victim, cut_off):
    job = Job(3)
    job.step(3)
    job.expect_success("save")
    job.step(1)
    _expect_one_commit_after_a_loss(job, cut_off, victim, 4)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("cut_off", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("part", ["copies.0", "copies.0.second"])
def test_compressors_of_one_state_go_back_to_the_same_commit(victim, cut_off, part):
    class Second(ThreadedTransport):
        def alltoall(self, parts, name):
            return super().alltoall(parts, f"{name}.second")

    jobs = [trained(3, steps_since=1) for _ in range(2)]
    jobs[0].form({(rank, f"deepreduce.elastic.{part}") for rank in cut_off})
    pairs = list(zip(jobs[0].workers, jobs[1].workers))
    for rank, (_, second) in enumerate(pairs):
        second.transport = Second(jobs[0].group, rank)

    def save(pair):
        save_together([worker.keeper for worker in pair])
        for worker in pair:
            worker.saved_model = worker.model

    outcomes = on_all(jobs[0].group, [functools.partial(save, pair) for pair in pairs])
    assert any(outcomes)
    agreed = 4 if outcomes[min({0, 1, 2} - {victim})] is None else 3
    with_copy = (victim + 1) % 3
    for job in jobs:
        job.lose(victim)
        job.fail()
        assert {slot.steps for slot in job.workers[0].slots.values()} == {agreed}
        # the other case warns, and continues from the previous commit
        if agreed == 3 or outcomes[with_copy] is None:
            job.expect_moment(agreed)


@pytest.mark.parametrize("cut_off", [0, 1, 2])
def test_a_failure_while_ranks_make_up_for_another(cut_off):
    job = trained(4)
    job.lose(1)
    for worker in job.workers:
        worker.restore()
    job.form({(cut_off, "deepreduce.elastic.copies.0")})
    outcomes = job.call("sync")
    assert isinstance(outcomes[cut_off], Lost)
    job.fail()
    job.expect_moment(3)


def test_a_rank_that_is_lost_with_the_one_after_it_is_told():
    job = trained(4)
    job.lose(1, 2)
    for worker in job.workers:
        worker.restore()
    job.form()
    with pytest.warns(
        UserWarning, match=r"ranks \[1\] were lost together with the ranks that had copies"
    ):
        on_all(job.group, [worker.keeper.sync for worker in job.workers])


def test_loss_scales_steps_and_reductions_follow_rank_0():
    job = Job(2)
    job.workers[0].slots["a"].loss_scale = 1024.0
    job.workers[0].slots["a"].steps = 5
    job.workers[0].slots["a"].reduction = "sum"
    job.workers.append(Worker(7))
    job.form()
    job.expect_success("sync")
    assert [
        (worker.slots["a"].loss_scale, worker.slots["b"].loss_scale) for worker in job.workers
    ] == [(1024.0, None)] * 3
    assert [worker.slots["a"].reduction for worker in job.workers] == ["sum"] * 3
    assert [worker.slots["a"].steps for worker in job.workers] == [5] * 3


@pytest.mark.parametrize("how", ["restored", "left", "joined"])
@pytest.mark.parametrize("gone", [[0], [2], [3], [0, 2], [1, 2]])
def test_memories_of_ranks_that_do_not_send_them_are_handed_on(gone, how, monkeypatch):
    """On hosts of two ranks, the first rank keeps and sends the memory.

    A rank that has become the second one passes its memory to the first.
    """
    monkeypatch.setattr(Worker, "per_host", 2)

    def keep(self, amounts):
        for slot in self.slots.values():
            if slot.residual is not None:
                slot.residual += amounts.integers(-9, 10, slot.residual.size) * (
                    self.transport.rank % 2 == 0
                )

    monkeypatch.setattr(Worker, "kept_in_a_step", keep)
    job = Job(4)
    job.step(2)
    job.expect_success("save")
    at_commit = job.kept()
    if how == "restored":
        job.step(1)
    job.lose(*gone)
    if how == "restored":
        for worker in job.workers:
            worker.restore()
    if how == "joined":
        job.workers += [Worker(40 + rank) for rank in gone]
    job.form()
    job.expect_success("sync")
    job.expect_kept(at_commit)
    assert all(not worker.kept.any() for worker in job.workers[1::2])
    job.step(1)


def test_ranks_that_are_configured_differently():
    job = trained(2)
    other = Worker(7)
    other.keeper._configuration = Configuration(1, {})
    job.workers.append(other)
    job.form()
    for outcome in job.call("sync"):
        assert isinstance(outcome, InvalidArgumentError)
        assert (
            "expected the same compressor configuration and parameters on every rank, got "
            "another one on rank 2 than on rank 0"
        ) in str(outcome)


@pytest.mark.parametrize(
    ("place", "value"),
    [(1, 2), (2, -1), (3, -4), (4, 2), (5, 0), (6, 7), (7, 0), (7, 2)],
    ids=["restored", "moved", "number", "rank", "size", "complete", "no distance", "distance"],
)
def test_numbers_that_no_rank_sends(place, value):
    job = trained(2)

    class Lying(ThreadedTransport):
        def allgather(self, array, name):
            if name == "deepreduce.elastic.statuses":
                array.view(np.int64)[place] = value
            return super().allgather(array, name)

    job.form()
    job.workers[1].transport = Lying(job.group, 1)
    assert {type(outcome) for outcome in job.call("sync")} == {CorruptPayloadError}


@pytest.mark.parametrize("name", ["statuses", "counters", "hosts", "copies.0"])
def test_fewer_bytes_than_expected(name):
    job = trained(2)
    shorter = lambda array: array[:-4] if array is not None and array.size else array  # noqa: E731

    class Short(ThreadedTransport):
        def allgather(self, array, name):
            return super().allgather(shorter(array) if name.endswith(short) else array, name)

        def broadcast(self, array, root, name):
            return super().broadcast(shorter(array) if name.endswith(short) else array, root, name)

        def alltoall(self, parts, name):
            return super().alltoall(
                [shorter(part) if name.endswith(short) else part for part in parts], name
            )

    short = name
    job.form()
    for worker in job.workers:
        worker.transport = Short(job.group, worker.transport.rank)
    assert {type(outcome) for outcome in job.call("sync")} == {CorruptPayloadError}
