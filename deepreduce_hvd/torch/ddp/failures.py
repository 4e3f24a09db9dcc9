"""Which rank is gone, after a failure of torch.distributed; and the watch on long waits.

The ranks' notes (:mod:`deepreduce_hvd.coordination.peers`) are in the store of torch.distributed,
which torchrun's own process serves, so that they outlive the ranks.
"""

import queue
import sys
import threading
from concurrent.futures import Future, TimeoutError

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

    The store may be on a host that can no longer be reached, so there is at most one request at a
    time. One thread makes all requests, because Python starts no threads at the end of the process.

    Args:
        store: the store.

    Attributes:
        store: the store of later requests, which may be another one.
    """

    def __init__(self, store):
        self.store = store
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by the thread that waits for an answer
        self._last = None  # the Future of the last request
        threading.Thread(target=self._run, name="deepreduce-notes", daemon=True).start()

    def _request(self, method, key, body=None):
        if not self._turn.acquire(timeout=_REQUEST_SECONDS):
            return None
        try:
            if self._last is not None and not self._last.done():
                return None
            self._last = Future()
            self._requests.put((self._last, method, key, body))
            return self._last.result(_REQUEST_SECONDS)
        except TimeoutError:
            return None
        finally:
            self._turn.release()

    def _run(self):
        while True:
            answer, *request = self._requests.get()
            answer.set_result(self._ask(*request))

    def _ask(self, method, key, body):
        key = f"deepreduce/{key}"
        try:
            if method == "PUT":
                self.store.set(key, body)
                return body
            if method == "DELETE":
                self.store.delete_key(key)
                return b""
            # a get would wait for a key that does not exist
            return self.store.get(key) if self.store.check([key]) else None
        except Exception:  # the store is gone
            return None


# The watcher takes this module for Horovod and calls these functions.


def is_initialized():
    return dist.is_initialized()


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def _find_wait(frame):
    """Return None: the only waits are exchanges, which the watcher finds itself."""
    return None


def _is_failure(error):
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


_watcher = None


def watch(adapter):
    """Start to watch an adapter's waits."""
    global _watcher
    # a program may destroy the process groups and initialize torch.distributed again
    store = dist.distributed_c10d._get_default_store()
    if _watcher is None:
        # the process group's time limit ends the waits
        board = StoreBoard(store)
        _watcher = Watcher(sys.modules[__name__], torch, _find_wait, _is_failure, None, board)
    _watcher.board.store = store
    _watcher.add(adapter)


def describe_failure(error):
    """Return what is known about a failure of torch.distributed, as the end of a sentence.

    Log the failure at once: torchrun may end this rank before its error is printed.
    """
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    log.error("deepreduce_hvd: rank %d: torch.distributed failed: %s", rank(), first_line)
    gone = "" if _watcher is None else _watcher.explain(_GRACE_SECONDS)
    return f"got a failure of torch.distributed ({first_line}){f': {gone}' if gone else ''}"
