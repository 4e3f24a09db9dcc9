"""Elastic training on PyTorch: what ``hvd.elastic.TorchState(compressor=comp, model=..., ...)`` does with a Compressor.

A rank's memory is a part of the gradients that no other rank has. So every commit leaves a copy of it with the next rank, and when ranks are
lost, the next rank takes over what they had kept at the last commit: the memories' sum over all ranks stays what it was.
"""

import warnings

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from deepreduce_hvd import state as saved_state
from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.errors import InvalidArgument


class _Commit:
    """One rank's part in a commit: its own state, and the copy of the rank before it, (n,) float32, once that has come."""

    def __init__(self, number, state):
        self.number = number
        self.state = state
        self.copy = None


class CompressorStateHandler(StateHandler):
    """Saves, restores and hands over one Compressor's state; Horovod calls it, on all ranks at once but for ``restore``.

    A commit sends the memory, dense, to the next rank. Since ranks may be cut off in the midst of a commit, so that it is complete on some
    only, the one before is kept until a step has followed; all go back to the newest that is complete on rank 0, whose model they get. If a
    rank is lost together with the one after it, what it had kept is lost, with a warning.
    """

    def __init__(self, compressor):
        super().__init__(compressor)
        if compressor.process_set is not None:
            raise InvalidArgument("elastic training: expected a compressor of all ranks, got one of a process set")
        self._session = compressor.session
        self._session.elastic = self
        self._commits = []  # the last one or two
        self._complete = 0  # number of the last one that is complete here
        self._steps = 0  # since the last one
        self._restored = False

    @property
    def _ranks_have_left(self):
        return bool(self._commits) and self._commits[-1].state["size"] != hvd.size()

    def save(self):
        if self._ranks_have_left:
            self.sync()
            return
        commit = _Commit(self._complete + 1, self._session.state_dict())
        self._commits = [*self._commits[-1:], commit]
        self._steps = 0
        commit.copy = self._from_the_rank_before()
        self._complete = commit.number

    def restore(self):
        self._session.abandon()
        self._restored = True
        self._load(self._complete)

    def sync(self):
        self._session.close_round()
        self._session.abandon()
        own = self._commits[-1].state if self._commits else None
        places = hvd.allgather_object((own and own["rank"], own and own["size"], self._complete), "deepreduce.elastic.places")
        agreed = places[0][2]
        if self._restored:
            self._load(agreed)
        if agreed:
            self._take_over(agreed, {rank for rank, _, _ in places}, places[0][1])
        counters = {name: (slot.steps, slot.loss_scale) for name, slot in self._session.slots.items()}
        for name, (steps, loss_scale) in hvd.broadcast_object(counters, 0, "deepreduce.elastic.counters").items():
            self._session.slots[name].steps = steps
            self._session.slots[name].loss_scale = loss_scale
        first = _Commit(agreed + 1, self._session.state_dict())
        first.copy = self._from_the_rank_before()
        self._commits, self._complete, self._restored = [first], first.number, False

    def follow(self):
        """Before a step. Horovod does not call sync when ranks have only left."""
        if self._ranks_have_left:
            self.sync()
        self._steps += 1
        if self._steps > 1:  # the step in between needed all ranks, which had therefore come through the commit
            del self._commits[:-1]

    def _load(self, number):
        for commit in self._commits:
            if commit.number == number:
                fingerprint, state = self.value.fingerprint, commit.state
                saved_state.load(self._session.slots, state, fingerprint, state["rank"], state["size"])

    def _take_over(self, number, present, size):
        """Adds the copy of a lost rank's memory to this rank's, if it is the next one."""
        lost = set(range(size)) - present
        gone = sorted(rank for rank in lost if (rank + 1) % size in lost)
        if gone and hvd.rank() == 0:
            warnings.warn(f"deepreduce_hvd: ranks {gone} were lost together with those that held copies of their memories", stacklevel=2)
        if not self._commits or (self._commits[-1].state["rank"] - 1) % size not in lost:
            return
        copies = {commit.number: commit.copy for commit in self._commits if commit.copy is not None}
        if number not in copies:
            found = "its memory is that of the commit before" if copies else "what it had kept is gone"
            warnings.warn(f"deepreduce_hvd: the rank before this one was lost in the midst of a commit; {found}", stacklevel=2)
        for copy in [copies[number]] if number in copies else list(copies.values())[:1]:
            for part, kept in zip(self._parts(), copy.split([part.numel() for part in self._parts()])):
                part.add_(kept.to(part.device))

    def _parts(self):
        return [part for slot in self._session.slots.values() for part in slot.state]

    def _from_the_rank_before(self):
        """The memory of the rank before this one, while the next one gets this one's."""
        parts = self._parts()
        own = torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
        splits = torch.zeros(hvd.size(), dtype=torch.int32)
        splits[(hvd.rank() + 1) % hvd.size()] = own.numel()
        received, _ = hvd.alltoall(own, splits, name="deepreduce.elastic.copies")
        return received


def register():
    """Makes hvd.elastic.TorchState know what to do with a Compressor."""
    known = get_handler_registry()
    if all(kind is not Compressor for kind, _ in known):
        set_handler_registry([*known, (Compressor, CompressorStateHandler)])
