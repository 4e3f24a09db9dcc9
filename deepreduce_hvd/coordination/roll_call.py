"""The roll call: which ranks take part in a step, asked before anything is gathered in it.

A rank that has called ``hvd.join()``, because its data has ended, gives zeros to every allreduce of
Horovod. Horovod ends on all ranks when it is to gather, without that rank, what it has gathered
before. So an allreduce with a place for each rank comes first, and nothing is gathered until it has
shown that all are there.
"""

import contextlib
import time

import numpy as np

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.errors import InvalidArgumentError

_MOST_SECONDS = 10.0
_PAUSE_SECONDS = 1e-3


class RollCall:
    """A handle of the transport, of several exchanges at once.

    Args:
        transport: of the group of ranks, which all call at once.
        label: the beginning of the collective's name.

    Attributes:
        sent_bytes: what is handed to the collective.
    """

    def __init__(self, transport, label):
        self._transport = transport
        places = np.zeros(transport.size, dtype=np.float32)
        places[transport.rank] = 1
        self.sent_bytes = places.nbytes
        self._handle = transport.allreduce(places, f"{label}.ranks")
        self._missing = None

    def query(self):
        return self._missing is not None or self._transport.test(self._handle)

    def result(self):
        """The ranks that do not take part; waits."""
        if self._missing is None:
            places = self._transport.wait(self._handle)
            self._missing = [
                rank for rank, place in zip(self._transport.ranks, places) if place == 0
            ]
        return self._missing

    def expect_all(self):
        """A generator that yields the handle; raises InvalidArgumentError when ranks are missing."""
        missing = yield self
        if missing:
            raise InvalidArgumentError(
                f"expected all {self._transport.size} ranks of the compressor's process set in every step, got nothing from "
                f"{ranks_text(missing)}, as after hvd.join(), which a compressor cannot make up for; give all ranks the same "
                "number of batches instead: with DistributedSampler or drop_last=True, or start again with the first batch "
                "where the data ends"
            )

    def wait(self):
        """Waits for the answer; raises InvalidArgumentError when ranks are missing.

        It returns when all ranks are there, or after ten seconds, in case that not all of them ask.
        A rank that ends shuts Horovod down for all others, so it also gives them the time to come
        to the same error.
        """
        answer = self.expect_all()
        next(answer)
        deadline = time.monotonic() + _MOST_SECONDS
        while not self.query():
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(StopIteration):
            answer.send(self.result())
