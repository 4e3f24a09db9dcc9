"""The roll call: find out which ranks take part in a step, before anything is gathered.

A rank that has called ``hvd.join()``, because it has no more data, contributes zeros to every
allreduce of Horovod. Gathers are different: a gather that has run with that rank before makes
Horovod fail on all ranks when it runs without it. So each step starts with an allreduce of one
element per rank. Nothing is gathered until its result shows that all ranks are present.
"""

import time

import numpy as np

from deepreduce_hvd.coordination.peers import ranks_text
from deepreduce_hvd.errors import InvalidArgumentError

#: How often each rank repeats its number in elastic training. When a rank is killed during a sum,
#: Horovod 0.28.1 on another rank continues with its next message, of 8 bytes or a few more. A third
#: rank may still wait for a part of the sum. If the message is longer than this part, Gloo aborts
#: the rank ("op.preamble.length <= op.nbytes"). Gloo splits a sum of n ranks into 2 n parts, so a
#: part has half of the numbers of one rank, 32 bytes.
REPEATED = 16
_MOST_SECONDS = 10.0
_PAUSE_SECONDS = 1e-3


class RollCall:
    """One roll call, which several exchanges can wait for; a handle like those of the transport.

    Args:
        transport: transport of the group of ranks. All ranks of the group make this call.
        label: first part of the collective's name.
        repeated: how often each rank repeats its number, the same on all ranks.

    Attributes:
        sent_bytes: bytes that this rank hands to the collective.
    """

    def __init__(self, transport, label, repeated=1):
        self._transport = transport
        self._repeated = repeated
        places = np.zeros((transport.size, repeated), dtype=np.float32)
        places[transport.rank] = 1
        self.sent_bytes = places.nbytes
        self._handle = transport.allreduce(places.reshape(-1), f"{label}.ranks")
        self._missing = None

    def query(self):
        return self._missing is not None or self._transport.test(self._handle)

    def result(self):
        """Return the list of ranks that do not take part. Blocks."""
        if self._missing is None:
            places = self._transport.wait(self._handle)[:: self._repeated]
            self._missing = [
                rank for rank, place in zip(self._transport.ranks, places) if place == 0
            ]
        return self._missing

    def expect_all(self):
        """Yield the handle once; raise InvalidArgumentError if its result shows missing ranks."""
        yield self
        self._expect_none_missing()

    def wait(self):
        """Wait for the result; raise InvalidArgumentError when ranks are missing.

        Return after ten seconds if there is no result, because perhaps not all ranks make this
        call. A rank that exits shuts Horovod down on all others, so the wait also gives the other
        ranks time to raise the same error.
        """
        deadline = time.monotonic() + _MOST_SECONDS
        while not self.query():
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_SECONDS)
        self._expect_none_missing()

    def _expect_none_missing(self):
        missing = self.result()
        if missing:
            raise InvalidArgumentError(
                f"expected all {self._transport.size} ranks of the compressor's process "
                "set in every step, got nothing from "
                f"{ranks_text(missing)}, as after hvd.join(), which a compressor does not "
                "support; give all ranks the same "
                "number of batches: use DistributedSampler or drop_last=True, or continue "
                "with the first batch on ranks "
                "whose data has ended"
            )
