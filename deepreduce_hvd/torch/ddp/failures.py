"""Which rank is gone, after a failure of torch.distributed; and the watch on long waits.

The ranks' notes (:mod:`deepreduce_hvd.coordination.peers`) are in the store of torch.distributed,
which torchrun's own process serves, so that they outlive the ranks.
"""

import sys
import threading

import torch
import torch.distributed as dist

from deepreduce_hvd.coordination.peers import Board, log
from deepreduce_hvd.coordination.watch import Watcher

#: maximum time in seconds that a rank waits for the notes of others: torchrun ends the remaining
#: ranks within a tenth of a second
_GRACE_SECONDS = 0.05
#: maximum time in seconds of one request to the store, whose own time limit is minutes
_REQUEST_SECONDS = 2.0


class StoreBoard(Board):
    """The notes of all ranks of a job, in a store of torch.distributed.

    The store may be on a host that can no longer be reached. While a request has no answer, no
    other one is made.
    """

    def __init__(self, store):
        self._store = store
        self._asks = None  # the thread of the last request

    def _request(self, method, key, body=None):
        if self._asks is not None and self._asks.is_alive():
            return None
        answers = []
        self._asks = threading.Thread(
            target=lambda: answers.append(self._ask(method, key, body)), daemon=True
        )
        self._asks.start()
        self._asks.join(_REQUEST_SECONDS)
        return answers[0] if answers else None

    def _ask(self, method, key, body):
        key = f"deepreduce/{key}"
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
    """Return what is known about a failure of torch.distributed, as the end of a sentence.

    Log the failure at once: torchrun may end this rank before its error is printed.
    """
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    log.error("deepreduce_hvd: rank %d: torch.distributed failed: %s", rank(), first_line)
    gone = "" if _watcher is None else _watcher.explain(_GRACE_SECONDS)
    return f"got a failure of torch.distributed ({first_line}){f': {gone}' if gone else ''}"
