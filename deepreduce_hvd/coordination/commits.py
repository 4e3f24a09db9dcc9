"""Commits of elastic training, and what ranks tell each other about the commits they have.

Ranks send arrays of int64 numbers of a fixed layout, which are checked on receipt.
"""

from typing import NamedTuple

import numpy as np

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError


class Commit:
    """One rank's part of a commit.

    Attributes:
        number: number of the commit, from 1.
        state: this rank's own state.
        distance: how many ranks further the copy of each memory is; 0 until ranks have agreed.
        copy: memory of the rank so many ranks before, (n,) float32; None until it has come.
        adopted: whether what the elastic state saves besides, such as the model, belongs to it.
    """

    def __init__(self, number, state):
        self.number = number
        self.state = state
        self.rank = state["rank"]
        self.size = state["size"]
        self.distance = 0
        self.copy = None
        self.adopted = False

    @property
    def complete(self):
        return self.adopted and self.copy is not None

    @property
    def summary(self):
        complete = int(self.complete)
        return CommitSummary(self.number, self.rank, self.size, complete, self.distance)


class CommitSummary(NamedTuple):
    """Data about a commit that a rank sends to the others."""

    number: int  # 0: no commit
    rank: int  # rank of this process at the commit
    size: int  # number of ranks at the commit
    complete: int  # whether the copy has come and the rank can go back to it, 0 or 1
    distance: int  # how many ranks further the copies are; 0: not agreed yet


class RankStatus:
    """Data about itself that a rank sends to the others.

    Args:
        fingerprint: fingerprint of the compressor.
        restored: whether the rank went back to its last commit, after a failure.
        moved: whether the rank made steps since its newest complete commit.
        commits: list of the :class:`CommitSummary` of its commits, at most two.
    """

    COMMITS = 2
    NUMBERS = 3 + COMMITS * len(CommitSummary._fields)

    def __init__(self, fingerprint, restored, moved, commits):
        self.fingerprint = fingerprint
        self.restored = restored
        self.moved = moved
        self.commits = commits

    @classmethod
    def unpack(cls, numbers):
        """Check and read the numbers of :meth:`pack`.

        Raises:
            CorruptPayloadError: numbers that no rank sends.
        """
        fingerprint, restored, moved, *rest = numbers
        width = len(CommitSummary._fields)
        entries = [
            CommitSummary(*rest[start : start + width]) for start in range(0, len(rest), width)
        ]
        commits = [entry for entry in entries if entry.number]
        for flag in (restored, moved, *(entry.complete for entry in commits)):
            if flag not in (0, 1):
                raise CorruptPayloadError(
                    f"elastic training: expected a flag of 0 or 1 from every rank, got {flag}"
                )
        for entry in commits:
            if entry.number < 0 or not 0 <= entry.rank < entry.size:
                raise CorruptPayloadError(
                    "elastic training: expected a commit's number, rank and size from every rank, "
                    f"got {entry.number}, {entry.rank} and {entry.size}"
                )
            largest = max(entry.size - 1, 1)
            if not entry.complete <= entry.distance <= largest:
                raise CorruptPayloadError(
                    f"elastic training: expected copies {entry.complete} to {largest} ranks "
                    f"further from every rank, got {entry.distance}"
                )
        return cls(fingerprint, bool(restored), bool(moved), commits)

    def pack(self):
        """Return the status as (NUMBERS,) int64."""
        nothing = [CommitSummary(0, 0, 0, 0, 0)] * (self.COMMITS - len(self.commits))
        numbers = [
            self.fingerprint,
            self.restored,
            self.moved,
            *(number for entry in (*self.commits, *nothing) for number in entry),
        ]
        return np.array(numbers, dtype=np.int64)

    @property
    def newest(self):
        """The number of the newest commit, 0 if there is none."""
        return max((entry.number for entry in self.commits), default=0)

    @property
    def complete(self):
        """The number of the newest complete commit, 0 if there is none."""
        return newest_complete(self.commits)

    def is_at(self, number):
        """Return whether this rank's memory is that of this commit, or will be restored to it."""
        return self.restored or (self.complete == number and not self.moved)


def newest_complete(commits):
    """Return the number of the newest complete commit of a list, 0 if there is none."""
    return max((commit.number for commit in commits if commit.complete), default=0)


def gather_numbers(transport, numbers, name):
    """Gather (n,) int64 from every rank; return a list with the list of numbers of each rank.

    All ranks call this at once.

    Raises:
        CorruptPayloadError: the ranks did not send n numbers each.
    """
    gathered = transport.wait(
        transport.allgather(numbers.view(np.uint8), f"deepreduce.elastic.{name}")
    )
    if gathered.size != transport.size * numbers.nbytes:
        raise CorruptPayloadError(
            f"elastic training: expected {numbers.nbytes} bytes from each of {transport.size} "
            f"ranks, got {gathered.size}"
        )
    return np.array(gathered).view(np.int64).reshape(transport.size, numbers.size).tolist()


def gather_statuses(transport, status):
    """Return the :class:`RankStatus` of every rank, in rank order. All ranks call this at once.

    Raises:
        CorruptPayloadError: a rank sent bytes that are not a status.
        InvalidArgumentError: the ranks' fingerprints differ.
    """
    rows = gather_numbers(transport, status.pack(), "statuses")
    statuses = [RankStatus.unpack(row) for row in rows]
    other = [
        rank for rank, one in enumerate(statuses) if one.fingerprint != statuses[0].fingerprint
    ]
    if other:
        raise InvalidArgumentError(
            "elastic training: expected the same compressor configuration and parameters "
            f"on every rank, got another one on {ranks_text(other)} than on rank 0"
        )
    return statuses


def lost_ranks(number, summaries):
    """Return which ranks of a commit are lost.

    Args:
        number: number of the commit.
        summaries: list of its :class:`CommitSummary`, one per rank that has it.

    Returns:
        The number of ranks at the commit, the set of those ranks that are lost, and how many ranks
        further the copies are.

    Raises:
        CorruptPayloadError: a rank appears twice, or the numbers of ranks or the distances differ.
    """
    size = summaries[0].size
    present = [entry.rank for entry in summaries]
    if len(set(present)) < len(present) or any(entry.size != size for entry in summaries):
        raise CorruptPayloadError(
            f"elastic training: expected commit {number} once from each of {size} ranks, "
            f"got it from {present}"
        )
    distances = {entry.distance for entry in summaries if entry.distance}
    if len(distances) > 1:
        raise CorruptPayloadError(
            f"elastic training: expected one distance of the copies of commit {number}, "
            f"got {sorted(distances)}"
        )
    return size, set(range(size)) - set(present), max(distances, default=0)
