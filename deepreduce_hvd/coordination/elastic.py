"""What becomes of memories when ranks come and go, in any framework.

A rank's memory is a part of the gradients that no other rank has. So every commit leaves a copy of
it with the next rank, and when ranks are lost, the next rank takes over what they had kept at that
commit: the memories' sum over all ranks stays what it was there. What ranks tell each other are
arrays of numbers of a fixed layout, checked when they come.
"""

import warnings
from typing import NamedTuple

import numpy as np

from deepreduce_hvd import checkpoint
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError

#: bytes of a memory that travel in one collective, whose lengths have 31 bits
_PART_BYTES = 1 << 30


class _Commit:
    """One rank's part in a commit: its own state, and the memory of the rank before it, (n,)
    float32, once that has come.
    """

    def __init__(self, number, state):
        self.number = number
        self.state = state
        self.rank = state["rank"]
        self.size = state["size"]
        self.copy = None


class _CommitEntry(NamedTuple):
    """What a rank tells of a commit."""

    number: int  # 0: there is none
    rank: int  # this rank's then
    size: int  # how many ranks there were
    complete: int  # whether the copy has come


class _Place:
    """What a rank tells of itself: int64 numbers in the order of ``pack``."""

    COMMITS = 2
    NUMBERS = 3 + COMMITS * len(_CommitEntry._fields)

    def __init__(self, fingerprint, restored, moved, commits):
        self.fingerprint = fingerprint
        self.restored = restored  # went back to its last commit, after a failure
        self.moved = moved  # has made steps since its last commit
        self.commits = commits

    @classmethod
    def unpack(cls, numbers):
        fingerprint, restored, moved, *rest = numbers
        entries = [_CommitEntry(*rest[start : start + 4]) for start in range(0, len(rest), 4)]
        commits = [entry for entry in entries if entry.number]
        for flag in (restored, moved, *(entry.complete for entry in commits)):
            if flag not in (0, 1):
                raise CorruptPayloadError(
                    f"elastic training: expected a flag of 0 or 1 from every rank, got {flag}"
                )
        for entry in commits:
            if entry.number < 0 or not 0 <= entry.rank < entry.size:
                raise CorruptPayloadError(
                    f"elastic training: expected a commit's number, rank and size from every rank, got {entry}"
                )
        return cls(fingerprint, bool(restored), bool(moved), commits)

    def pack(self):
        nothing = [_CommitEntry(0, 0, 0, 0)] * (self.COMMITS - len(self.commits))
        numbers = [
            self.fingerprint,
            self.restored,
            self.moved,
            *(number for entry in (*self.commits, *nothing) for number in entry),
        ]
        return np.array(numbers, dtype=np.int64)

    @property
    def complete(self):
        """The number of the newest complete commit, 0 if there is none."""
        return max((entry.number for entry in self.commits if entry.complete), default=0)

    def is_at(self, number):
        """Whether its memory is, or is going to be, that of this commit."""
        return self.restored or (self.complete == number and not self.moved)


class MemoryKeeper:
    """Saves, restores and hands over one compressor's state; all methods but ``restore`` are called
    on all ranks at once.

    Since ranks may be cut off in the midst of a commit, so that it is complete on some only, the
    one before is kept too; all go back to the newest that is complete on rank 0, whose model they
    get. If a rank is lost together with the one after it, what it had kept is lost, with a warning.

    When ranks leave after steps that no commit has seen, nobody has what they kept in those steps:
    all ranks go back to the last commit, as after a failure.

    Args:
        compressor: a :class:`Compressor` of all ranks.
        failure: what Horovod's elastic loop takes for a failure, an exception that all ranks raise
            to go back.
    """

    def __init__(self, compressor, failure):
        if compressor.process_set is not None:
            raise InvalidArgumentError(
                "elastic training: expected a compressor of all ranks, got one of a process set"
            )
        self._fingerprint = compressor.fingerprint
        self._adapter = compressor.adapter
        self._adapter.elastic = self
        self._failure = failure
        self._commits = []  # the last one or two
        self._rounds = 0  # since the last one
        self._restored = False
        #: whether it has raised what makes all ranks go back, while Horovod has not failed
        self.goes_back = False

    @property
    def _transport(self):
        return self._adapter.transport

    @property
    def _slots(self):
        return self._adapter.slots.values()

    @property
    def ranks_have_left(self):
        return bool(self._commits) and self._commits[-1].size != self._transport.size

    # --- what Horovod's elastic state calls ---

    def save(self):
        """Makes a commit."""
        if self.ranks_have_left:
            self.sync()
            return
        number = self._commits[-1].number + 1 if self._commits else 1
        self._commit(self._commits[-1:], number)

    def restore(self):
        """Goes back to the last commit."""
        self.goes_back = False
        self._adapter.abandon()
        self._restored = True
        self._load(self._place().complete)

    def sync(self):
        """Makes up for ranks that have come or gone."""
        self._adapter.close_round()
        self._adapter.abandon()
        handshake.agree(self._adapter, with_steps=False)  # steps are made equal below
        places = self._gather_places()
        agreed = places[0].complete
        if agreed:
            self._make_up(agreed, places)
        self._hand_on()
        self._follow_rank_0()
        newest = max((entry.number for place in places for entry in place.commits), default=0)
        self._restored = False
        self._commit([commit for commit in self._commits if commit.number == agreed], newest + 1)

    def follow(self):
        """Before a step. Horovod does not call sync when ranks have only left."""
        if self.ranks_have_left:
            self.sync()
        self._rounds += 1
        # the step in between needed all ranks, which had therefore come through the commit
        if self._rounds > 1:
            del self._commits[:-1]

    # --- how ---

    def _make_up(self, agreed, places):
        """Brings memories to the agreed commit if ranks have failed or left since, those of lost
        ranks too.
        """
        entries = [entry for place in places for entry in place.commits if entry.number == agreed]
        size = entries[0].size
        present = [entry.rank for entry in entries]
        if len(set(present)) < len(present) or any(entry.size != size for entry in entries):
            raise CorruptPayloadError(
                f"elastic training: expected commit {agreed} once from each of {size} ranks, got it from {present}"
            )
        lost = set(range(size)) - set(present)
        old = [place for place in places if place.commits]
        if (lost or any(place.restored for place in old)) and not all(
            place.is_at(agreed) for place in old
        ):
            text = (
                f"ranks {sorted(lost)} left without a commit"
                if lost
                else "some ranks went back to their last commit"
            )
            self._warn(f"{text}: training goes on from the last commit")
            self.goes_back = True
            raise self._failure(f"deepreduce_hvd: {text}")
        if self._restored:
            self._load(agreed)
        self._take_over(agreed, lost, size)

    def _place(self):
        entries = [
            _CommitEntry(commit.number, commit.rank, commit.size, int(commit.copy is not None))
            for commit in self._commits
        ]
        moved = False
        if self._commits:
            saved = self._commits[-1].state["parameters"]
            moved = any(
                slot.steps != saved[name]["steps"] for name, slot in self._adapter.slots.items()
            )
        return _Place(self._fingerprint, self._restored, moved, entries)

    def _gather_places(self):
        transport = self._transport
        row = self._place().pack()
        gathered = transport.wait(
            transport.allgather(row.view(np.uint8), "deepreduce.elastic.places")
        )
        if gathered.size != transport.size * row.nbytes:
            raise CorruptPayloadError(
                f"elastic training: expected {row.nbytes} bytes from each of {transport.size} ranks, got {gathered.size}"
            )
        numbers = np.array(gathered).view(np.int64).reshape(transport.size, _Place.NUMBERS)
        places = [_Place.unpack(place) for place in numbers.tolist()]
        other = [
            rank for rank, place in enumerate(places) if place.fingerprint != places[0].fingerprint
        ]
        if other:
            raise InvalidArgumentError(
                f"elastic training: expected the same compressor configuration and parameters on every rank, got others than rank 0's on {other}"
            )
        return places

    def _follow_rank_0(self):
        """Takes rank 0's step counters and loss scales."""
        transport = self._transport
        steps = np.array([slot.steps for slot in self._slots], dtype=np.int64)
        scales = np.array(
            [np.nan if slot.loss_scale is None else slot.loss_scale for slot in self._slots],
            dtype=np.float64,
        )
        own = np.concatenate([steps.view(np.uint8), scales.view(np.uint8)])
        received = transport.wait(
            transport.broadcast(
                own if transport.rank == 0 else None, 0, "deepreduce.elastic.counters"
            )
        )
        if received.size != own.size:
            raise CorruptPayloadError(
                f"elastic training: expected {own.size} bytes of counters from rank 0, got {received.size}"
            )
        steps, scales = np.split(np.array(received), [steps.nbytes])
        for slot, taken, scale in zip(
            self._slots, steps.view(np.int64).tolist(), scales.view(np.float64).tolist()
        ):
            if taken < 0 or not (np.isnan(scale) or 0 < scale < np.inf):
                raise CorruptPayloadError(
                    f"elastic training: expected rank 0's steps and loss scale, got {taken} and {scale}"
                )
            slot.steps = taken
            slot.loss_scale = None if np.isnan(scale) else scale

    def _commit(self, before, number):
        """A new commit, complete once the copies have come; ``before``: what is kept beside it."""
        commit = _Commit(number, self._adapter.state_dict())
        self._commits = [*before, commit]
        self._rounds = 0
        commit.copy = self._from_the_rank_before()

    def _load(self, number):
        """Takes the memory of a commit, or none where this rank was not there."""
        for commit in self._commits:
            if commit.number == number:
                checkpoint.load(
                    self._adapter.slots, commit.state, self._fingerprint, commit.rank, commit.size
                )
                return
        for slot in self._slots:
            slot.set_memory({kind: 0 * part for kind, part in slot.memory().items()})

    def _take_over(self, number, lost, size):
        """Adds the copy of a lost rank's memory to this rank's, if it is the next one."""
        gone = sorted(rank for rank in lost if (rank + 1) % size in lost)
        if gone:
            self._warn(
                f"ranks {gone} were lost together with those that held copies of their memories"
            )
        own = next((commit for commit in self._commits if commit.number == number), None)
        if own is None or (own.rank - 1) % size not in lost:
            return
        copies = [
            commit.copy
            for commit in self._commits
            if commit.copy is not None and (commit.rank, commit.size) == (own.rank, own.size)
        ]
        copy = own.copy
        if copy is None:
            found = (
                "its memory is that of the commit before" if copies else "what it had kept is gone"
            )
            warnings.warn(
                f"deepreduce_hvd: the rank before this one was lost in the midst of a commit; {found}",
                stacklevel=2,
            )
            copy = copies[0] if copies else None
        if copy is not None:
            self._add(copy)

    def _add(self, copy):
        start = 0
        for slot in self._slots:
            memory = slot.memory()
            for part in memory.values():
                array = np.asarray(part)  # the same memory: slots give copies
                array += copy[start : start + array.size].reshape(array.shape)
                start += array.size
            slot.set_memory(memory)

    def _from_the_rank_before(self):
        """The memory of the rank before this one, (n,) float32, while the next one gets this one's."""
        transport = self._transport
        own = self._flat()
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        copy = np.empty_like(own)
        for start, received in self._sent(own, after, [before], "copies"):
            copy[start : start + received[before].size] = received[before]
        return copy.view(np.float32)

    def _hand_on(self):
        """Gives the memory of a rank that no longer sends it to the one that does: a host has
        another first rank when ranks have left.
        """
        transport = self._transport
        keepers = [self._adapter.keeper_of(rank) for rank in range(transport.size)]
        if keepers == list(range(transport.size)):
            return
        own = self._flat()
        keeper = keepers[transport.rank]
        hands_on = keeper != transport.rank and bool(own.any())
        flags = transport.wait(
            transport.allgather(np.array([hands_on], dtype=np.uint8), "deepreduce.elastic.keepers")
        )
        if flags.size != transport.size or flags.max() > 1:
            raise CorruptPayloadError(
                f"elastic training: expected a flag of 0 or 1 from each of {transport.size} ranks, got {flags}"
            )
        if not flags.any():
            return
        givers = [
            rank for rank, flag in enumerate(flags) if flag and keepers[rank] == transport.rank
        ]
        total = np.zeros(own.size // 4, dtype=np.float32)
        for start, received in self._sent(own, keeper if hands_on else None, givers, "handed"):
            for rank in givers:
                part = np.array(received[rank]).view(np.float32)
                total[start // 4 : start // 4 + part.size] += part
        if hands_on:
            for slot in self._slots:
                slot.set_memory({kind: 0 * part for kind, part in slot.memory().items()})
        if givers:
            self._add(total)

    def _flat(self):
        """This rank's memory, (n,) uint8."""
        parts = [
            np.asarray(part).reshape(-1) for slot in self._slots for part in slot.memory().values()
        ]
        return np.concatenate(parts).view(np.uint8) if parts else np.zeros(0, dtype=np.uint8)

    def _sent(self, own, receiver, givers, what):
        """Sends ``own`` to a rank, in parts; yields where a part starts, and what came from each
        rank, as many bytes from each of ``givers``.
        """
        transport = self._transport
        for start in range(0, own.size, _PART_BYTES):
            sent = own[start : start + _PART_BYTES]
            handed = [sent if rank == receiver else sent[:0] for rank in range(transport.size)]
            received = transport.wait(
                transport.alltoall(handed, f"deepreduce.elastic.{what}.{start}")
            )
            for rank in givers:
                if received[rank].size != sent.size:
                    raise CorruptPayloadError(
                        f"elastic training: expected {sent.size} bytes of memory from rank {rank}, got {received[rank].size}"
                    )
            yield start, received

    def _warn(self, text):
        if self._transport.rank == 0:
            warnings.warn(f"deepreduce_hvd: {text}", stacklevel=3)


def expect_keeper(keeper, notification_manager):
    """Raises InvalidArgumentError within ``hvd.elastic.run`` when the compressor is not among what
    its state keeps.

    ``notification_manager`` is Horovod's, which knows the states that are in training.
    """
    if keeper is None and notification_manager._listeners:
        raise InvalidArgumentError(
            "elastic training: expected the compressor among what the state keeps, as hvd.elastic.TorchState(compressor=comp, ...) or "
            "deepreduce_hvd.tensorflow.elastic.TensorFlowKerasState(model, optimizer, compressor=comp) has it, got a state without it; the "
            "memories of ranks that leave would be lost"
        )
