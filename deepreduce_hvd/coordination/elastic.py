"""Elastic training, in any framework: keep the memories of ranks that come and go.

A rank's memory holds parts of gradients that no other rank has. So every commit leaves a copy of
each rank's memory on the next rank. When ranks are lost, the next rank adds the copy of the lost
rank's memory to its own. The sum of the memories over all ranks is then that of the commit.
Messages between ranks are arrays of numbers of a fixed layout, and are checked on receipt.
"""

import warnings
from typing import NamedTuple

import numpy as np

from deepreduce_hvd import checkpoint
from deepreduce_hvd.coordination import handshake
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError

#: bytes of a memory per collective; Horovod's lengths have 31 bits
_PART_BYTES = 1 << 30


class _Commit:
    """One rank's part of a commit.

    Attributes:
        number: number of the commit, from 1.
        state: this rank's own state.
        copy: memory of the previous rank, (n,) float32; None until it has come.
    """

    def __init__(self, number, state):
        self.number = number
        self.state = state
        self.rank = state["rank"]
        self.size = state["size"]
        self.copy = None


class _CommitEntry(NamedTuple):
    """Data about a commit that a rank sends to the others."""

    number: int  # 0: no commit
    rank: int  # rank of this process at the commit
    size: int  # number of ranks at the commit
    complete: int  # whether the copy has come, 0 or 1


class _Place:
    """Data about itself that a rank sends to the others: int64 numbers in the order of ``pack``."""

    COMMITS = 2
    NUMBERS = 3 + COMMITS * len(_CommitEntry._fields)

    def __init__(self, fingerprint, restored, moved, commits):
        self.fingerprint = fingerprint
        self.restored = restored  # whether it went back to its last commit, after a failure
        self.moved = moved  # whether it made steps since its last commit
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
        """Return whether this rank's memory is that of this commit, or will be restored to it."""
        return self.restored or (self.complete == number and not self.moved)


class MemoryKeeper:
    """Save, restore and hand over one compressor's state.

    All methods but ``restore`` are collective: all ranks call them at once.

    A rank may be lost during a commit, which is then complete on some ranks only. So the previous
    commit is kept too. All ranks go back to the newest commit that is complete on rank 0, because
    they also get the model of rank 0. If a rank and the next one are lost together, the memory of
    the first is lost, with a warning.

    When ranks leave after steps that no commit covers, nobody has what their memories gained in
    those steps. All ranks then go back to the last commit, as after a failure.

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
        self._fingerprint = compressor.fingerprint
        self._adapter = compressor.adapter
        self._adapter.elastic = self
        self._failure = failure
        self._commits = []  # the last one or two, oldest first
        self._rounds = 0  # number of steps begun since the last commit
        self._restored = False
        #: whether it raised ``failure`` to make all ranks go back, without a failure of Horovod
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

    # --- called by Horovod's elastic state ---

    def save(self):
        """Make a commit."""
        if self.ranks_have_left:
            self.sync()
            return
        number = self._commits[-1].number + 1 if self._commits else 1
        self._commit(self._commits[-1:], number)

    def restore(self):
        """Go back to the last commit."""
        self.goes_back = False
        self._adapter.abandon()
        self._restored = True
        self._load(self._place().complete)

    def sync(self):
        """Make all ranks' states consistent after ranks have come or gone, and make a commit."""
        self._adapter.close_round()
        self._adapter.abandon()
        handshake.agree(self._adapter, with_steps=False)  # ``_follow_rank_0`` makes steps equal
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
        """Prepare for a step. Call ``sync`` if ranks have left, because Horovod does not then."""
        if self.ranks_have_left:
            self.sync()
        self._rounds += 1
        # a step needs all ranks, so after one step all ranks have finished the last commit
        if self._rounds > 1:
            del self._commits[:-1]

    # --- implementation ---

    def _make_up(self, agreed, places):
        """Bring the memories to the agreed commit, and take over those of lost ranks.

        Args:
            agreed: number of the newest commit that is complete on rank 0.
            places: the :class:`_Place` of every rank, in rank order.
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
        """Take the step counters and loss scales of rank 0."""
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
        """Make a commit; it is complete once the copies have come.

        Args:
            before: list of older commits to keep.
            number: number of the new commit.
        """
        commit = _Commit(number, self._adapter.state_dict())
        self._commits = [*before, commit]
        self._rounds = 0
        commit.copy = self._from_the_rank_before()

    def _load(self, number):
        """Load the memory of a commit, or zeros if this rank was not part of it."""
        for commit in self._commits:
            if commit.number == number:
                checkpoint.load(
                    self._adapter.slots, commit.state, self._fingerprint, commit.rank, commit.size
                )
                return
        for slot in self._slots:
            slot.set_memory({kind: 0 * part for kind, part in slot.memory().items()})

    def _take_over(self, number, lost, size):
        """Add the copy of a lost rank's memory to this rank's memory, if this is the next rank."""
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
                array = np.asarray(part)  # a view; ``memory()`` returned copies
                array += copy[start : start + array.size].reshape(array.shape)
                start += array.size
            slot.set_memory(memory)

    def _from_the_rank_before(self):
        """Send this rank's memory to the next rank; return the previous rank's, (n,) float32."""
        transport = self._transport
        own = self._flat()
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        copy = np.empty_like(own)
        for start, received in self._sent(own, after, [before], "copies"):
            copy[start : start + received[before].size] = received[before]
        return copy.view(np.float32)

    def _hand_on(self):
        """Move memories to the ranks that now send for them.

        A hierarchical communicator sends from the first rank of a host, and that rank may change
        when ranks have left.
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
        """Return this rank's memory as (n,) uint8."""
        parts = [
            np.asarray(part).reshape(-1) for slot in self._slots for part in slot.memory().values()
        ]
        return np.concatenate(parts).view(np.uint8) if parts else np.zeros(0, dtype=np.uint8)

    def _sent(self, own, receiver, givers, what):
        """Send ``own`` to a rank, in parts; a generator.

        Args:
            own: (n,) uint8, of equal size on all ranks.
            receiver: rank that gets it; None for none.
            givers: ranks that send to this one; each must send parts of the same sizes.
            what: text for the names of the collectives.

        Yields:
            The start of a part in bytes, and the list of the parts received from every rank.
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
    """Raise InvalidArgumentError in elastic training if no elastic state has the compressor.

    Args:
        keeper: the compressor's :class:`MemoryKeeper`, or None.
        notification_manager: Horovod's; it knows the elastic states in training.
    """
    if keeper is None and notification_manager._listeners:
        raise InvalidArgumentError(
            "elastic training: expected the compressor among what the state keeps, as hvd.elastic.TorchState(compressor=comp, ...) or "
            "deepreduce_hvd.tensorflow.elastic.TensorFlowKerasState(model, optimizer, compressor=comp) has it, got a state without it; the "
            "memories of ranks that leave would be lost"
        )
