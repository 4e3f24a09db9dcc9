"""Which rank is gone, after a failure of torch.distributed; and the watch on long waits.

The ranks' notes (:mod:`deepreduce_hvd.coordination.peers`) are in the store of torch.distributed,
which torchrun's own process serves, so that they outlive the ranks.
"""

import sys

import torch
import torch.distributed as dist

from deepreduce_hvd.coordination.peers import Board
from deepreduce_hvd.coordination.watch import Watcher

#: maximum time in seconds that a rank waits for the notes of others: torchrun ends the remaining
#: ranks within a tenth of a second
_GRACE_SECONDS = 0.05


class StoreBoard(Board):
    """The notes of all ranks of a job, in a store of torch.distributed."""

    def __init__(self, store):
        self._store = store

    def _request(self, method, rank, body=None):
        key = f"deepreduce/rank.{rank}"
        try:
            if method == "PUT":
                self._store.set(key, body)
                return body
            if method == "DELETE":
                self._store.delete_key(key)
                return b""
            # a get would wait for a key that does not exist
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:  # the store is gone
            return None


# The watcher asks these of the module that communicates.


def is_initialized():
    return dist.is_initialized()


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def _find_wait(frame):
    """Find no other waits than exchanges, which the watcher finds itself."""
    return None


def _is_failure(error):
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


def _shut_down():
    """Do nothing: the process group's timeout ends its waits."""


_watcher = None


def watch(adapter):
    """Start to watch an adapter's waits."""
    global _watcher
    if _watcher is None:
        board = StoreBoard(dist.distributed_c10d._get_default_store())
        _watcher = Watcher(sys.modules[__name__], torch, _find_wait, _is_failure, _shut_down, board)
    _watcher.add(adapter)


def describe_failure(error):
    """Return what is known about a failure of torch.distributed, as the end of a sentence."""
    gone = "" if _watcher is None else _watcher.explain(_GRACE_SECONDS)
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"got a failure of torch.distributed ({first_line}){f': {gone}' if gone else ''}"
