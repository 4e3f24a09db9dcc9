"""Elastic training, in any framework: keep the memories of ranks that come and go.

A rank's memory holds parts of gradients that no other rank has. So every commit leaves a copy of
each rank's memory on another rank, which is on another host if possible. When a rank is lost, the
rank with the copy adds it to its own memory. The sum of the memories over all ranks is then that of
the commit. If gradients are averaged, all memories are then multiplied by the new number of ranks
over the old one. So their mean, the gradient that has not been sent yet, is that of the commit.
"""

import numpy as np

from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.communicators.wire import REDUCTIONS
from deepreduce_hvd.coordination import handshake, memory_transfer
from deepreduce_hvd.coordination.commits import (
    Commit,
    RankStatus,
    gather_statuses,
    lost_ranks,
    newest_complete,
)
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.user_warnings import warn

#: what ``is_table`` of a slot can be
_TABLES = (None, False, True)


class MemoryKeeper:
    """Save, restore and hand over one compressor's state.

    All methods but ``restore`` and ``adopt`` are collective: all ranks call them at once.

    If a rank is lost during a commit, the commit is complete on some ranks only. So the previous
    commit is kept too. All ranks go back to the newest commit that is complete on rank 0, because
    they also get the model of rank 0. If a rank and the one with its copy are lost together, the
    memory of the first is lost, with a warning.

    If ranks leave after steps that no commit covers, no other rank has what their memories gained
    in those steps. All ranks then go back to the last commit, as after a failure.

    Args:
        compressor: a :class:`Compressor` of all ranks.
        failure: exception type that makes Horovod's elastic loop go back to the last commit; all
            ranks raise it.

    Raises:
        InvalidArgumentError: the compressor has a process set.
    """

    def __init__(self, compressor, failure):
        if compressor.process_set is not None:
            raise InvalidArgumentError(
                "elastic training: expected a compressor of all ranks, got one of a process set"
            )
        self._configuration = compressor.configuration
        self._compressor = compressor
        self._adapter.elastic = self
        self._failure = failure
        self._commits = []  # the last one or two, oldest first
        # a loaded state, to which ``restore`` goes back before the first commit is complete
        has_begun = any(slot.steps for slot in self._slots)
        self._first = self._adapter.state_dict() if has_begun else None
        self._steps_since_commit = 0
        self._restored_at = None  # {name: step counter} after ``restore``, until ``sync``

    @property
    def _adapter(self):
        return self._compressor.adapter  # another one after ``close``

    @property
    def _transport(self):
        return self._adapter.transport

    @property
    def _slots(self):
        return self._adapter.slots.values()

    @property
    def _restored(self):
        """Whether the memories are those of the last commit because of ``restore``.

        The program may call ``restore`` itself, and then make steps from there.
        """
        return self._restored_at == self._steps()

    @property
    def ranks_have_left(self):
        return bool(self._commits) and self._commits[-1].size != self._transport.size

    # --- called by Horovod's elastic state ---

    def prepare_commit(self):
        """Make a commit, to which ``restore`` goes back only after :meth:`adopt`."""
        if self.ranks_have_left:
            self.sync()
            return
        number = self._commits[-1].number + 1 if self._commits else 1
        self._commit(newest_complete(self._commits), number)

    def adopt(self):
        """Make the newest commit the one that ``restore`` goes back to. Not collective."""
        self._commits[-1].adopted = True

    def restore(self):
        """Go back to the last commit, or to the state when this was created. Not collective."""
        self._adapter.abandon()
        number = newest_complete(self._commits)
        if not number and self._first is not None:
            self._load_state(self._first)
        else:
            self._load(number)
        self._restored_at = self._steps()

    def sync(self):
        """Make all ranks' states consistent after ranks have come or gone, and make a commit.

        If ranks made steps since the commit that they have, ``restore`` goes back to the new one
        only after :meth:`adopt`: until then the saved model is that of the other.
        """
        self._adapter.close_steps()
        self._adapter.abandon()
        handshake.agree(self._adapter, with_steps=False)  # ``_follow_rank_0`` makes steps equal
        statuses = gather_statuses(self._transport, self._status())
        agreed = statuses[0].complete
        old = [status for status in statuses if status.commits]
        unchanged = all(status.is_at(agreed) for status in old)
        # memories that no rank restored belong to the last commit, even if it is not complete
        restored = any(status.restored for status in old)
        number = agreed if restored else statuses[0].newest
        if number:
            self._return_to(number, unchanged, restored, statuses)
        transport = self._transport
        keepers = [self._adapter.keeper_of(rank) for rank in range(transport.size)]
        memory_transfer.hand_over(self._slots, transport, keepers)
        self._follow_rank_0()
        newest = max(status.newest for status in statuses)
        self._restored_at = None
        self._commit(agreed, newest + 1, adopted=unchanged)

    def follow(self):
        """Prepare for a step. If ranks have left, call ``sync``: Horovod does not call it then."""
        if self.ranks_have_left:
            self.sync()
        self._steps_since_commit += 1
        # a step needs all ranks, so after one step all ranks have finished the last commit
        if self._steps_since_commit > 1:
            complete = newest_complete(self._commits)
            self._commits = [commit for commit in self._commits if commit.number >= complete]

    # --- implementation ---

    def _return_to(self, number, unchanged, restored, statuses):
        """Bring the memories to a commit, and take over those of lost ranks.

        Args:
            number: number of the commit.
            unchanged: whether all ranks are at the newest commit that is complete on rank 0.
            restored: whether some ranks went back to their last commit.
            statuses: the :class:`RankStatus` of every rank, in rank order.
        """
        size, lost, distance = lost_ranks(
            number,
            [entry for status in statuses for entry in status.commits if entry.number == number],
        )
        if (lost or restored) and not unchanged:
            text = (
                f"ranks {sorted(lost)} left without a commit"
                if lost
                else "some ranks went back to their last commit"
            )
            self._warn(f"{text}: all ranks go back to the last commit")
            raise self._failure(f"deepreduce_hvd: {text}")
        # A new rank may have loaded an earlier state. Its part is in the memories of the others.
        if self._restored or not self._commits:
            self._load(number)
        self._take_over(number, lost, size, distance)
        memory_transfer.rescale(self._slots, size, self._transport.size)

    def _steps(self):
        return {name: slot.steps for name, slot in self._adapter.slots.items()}

    def _status(self):
        moved = False
        if self._commits:
            saved = self._commits[-1].state["parameters"]
            moved = not self._commits[-1].complete or any(
                steps != saved[name]["steps"] for name, steps in self._steps().items()
            )
        summaries = [commit.summary for commit in self._commits]
        return RankStatus(self._configuration.fingerprint, self._restored, moved, summaries)

    def _follow_rank_0(self):
        """Take the step counters, reductions, loss scales and embedding tables of rank 0."""
        transport = self._transport
        steps = np.array([slot.steps for slot in self._slots], dtype=np.int64)
        scales = np.array(
            [np.nan if slot.loss_scale is None else slot.loss_scale for slot in self._slots],
            dtype=np.float64,
        )
        reductions = np.array(
            [REDUCTIONS.index(slot.reduction) for slot in self._slots], dtype=np.uint8
        )
        tables = np.array([_TABLES.index(slot.is_table) for slot in self._slots], dtype=np.uint8)
        own = np.concatenate([steps.view(np.uint8), scales.view(np.uint8), reductions, tables])
        received = transport.wait(
            transport.broadcast(
                own if transport.rank == 0 else None, 0, "deepreduce.elastic.counters"
            )
        )
        if received.size != own.size:
            raise CorruptPayloadError(
                f"elastic training: expected {own.size} bytes of counters from rank 0, "
                f"got {received.size}"
            )
        ends = np.cumsum([steps.nbytes, scales.nbytes, reductions.nbytes])
        parts = np.split(np.array(received), ends)
        counters = parts[0].view(np.int64), parts[1].view(np.float64), *parts[2:]
        for slot, *counter in zip(self._slots, *(part.tolist() for part in counters)):
            taken, scale, reduction, table = counter
            if (
                taken < 0
                or not (np.isnan(scale) or 0 < scale < np.inf)
                or reduction >= len(REDUCTIONS)
                or table >= len(_TABLES)
            ):
                raise CorruptPayloadError(
                    "elastic training: expected rank 0's steps, loss scale, reduction and table,"
                    f" got {taken}, {scale}, {reduction} and {table}"
                )
            slot.set_steps(taken)
            slot.reduction = REDUCTIONS[reduction] or slot.reduction
            slot.loss_scale = None if np.isnan(scale) else scale
            slot.is_table = _TABLES[table]
        self._adapter.follow_tables()

    def _commit(self, before, number, adopted=False):
        """Make a commit; it is complete once the copies have come and it is adopted.

        Args:
            before: number of the commit to keep until then.
            number: number of the new commit.
            adopted: whether it is the same moment of training as that commit.
        """
        commit = Commit(number, self._adapter.state_dict())
        commit.adopted = adopted
        self._commits = [*(one for one in self._commits if one.number == before), commit]
        if before:
            self._first = None
        self._steps_since_commit = 0
        commit.distance = memory_transfer.distance_of_copies(self._transport)
        commit.copy = memory_transfer.copy_of_other_rank(
            self._slots, self._transport, commit.distance
        )

    def _load(self, number):
        """Load the memory of a commit, or zeros if this rank was not part of it."""
        for commit in self._commits:
            if commit.number == number:
                self._load_state(commit.state)
                return
        memory_transfer.clear(self._slots)

    def _load_state(self, state):
        checkpoint.load(
            self._adapter.slots, state, self._configuration, state["rank"], state["size"]
        )
        self._adapter.follow_tables()

    def _take_over(self, number, lost, size, distance):
        """Add the copy of a lost rank's memory to this rank's memory, if this rank has it."""
        gone = sorted(rank for rank in lost if (rank + distance) % size in lost)
        if gone:
            self._warn(
                f"ranks {gone} were lost together with the ranks that had copies of their "
                "memories; "
                "these memories are lost"
            )
        own = next((commit for commit in self._commits if commit.number == number), None)
        if own is None:
            return
        copied = (own.rank - distance) % size
        if copied not in lost:
            return
        copies = [
            commit.copy
            for commit in self._commits
            if commit.copy is not None
            and (commit.rank, commit.size, commit.distance) == (own.rank, own.size, distance)
        ]
        copy = own.copy
        if copy is None:
            found = (
                "its memory of the previous commit is used instead"
                if copies
                else "its memory is lost"
            )
            warn(f"rank {copied} was lost during a commit; {found}")
            copy = copies[0] if copies else None
        if copy is not None:
            memory_transfer.add(self._slots, copy)

    def _warn(self, text):
        if self._transport.rank == 0:
            warn(text)


def save_together(keepers):
    """Make a commit of all compressors of one elastic state. All ranks call this at once.

    A rank may be lost in the part of any compressor. Then none of them has a new commit, so that
    all go back to the same one. The caller saves the model after this, when nothing can be lost.

    Args:
        keepers: list of the :class:`MemoryKeeper` of each compressor.
    """
    for keeper in keepers:
        keeper.prepare_commit()
    for keeper in keepers:
        keeper.adopt()


def expect_keeper(keeper, notification_manager):
    """Raise InvalidArgumentError in elastic training if no elastic state has the compressor.

    Args:
        keeper: the compressor's :class:`MemoryKeeper`, or None.
        notification_manager: that of Horovod; it has the elastic states in use.
    """
    if keeper is None and notification_manager._listeners:
        raise InvalidArgumentError(
            "elastic training: expected an elastic state with the compressor, such as "
            "hvd.elastic.TorchState(compressor=comp, ...) or "
            "deepreduce_hvd.tensorflow.elastic.TensorFlowKerasState(model, optimizer, "
            "compressor=comp), got one without it; the memories "
            "of ranks that leave would be lost"
        )
