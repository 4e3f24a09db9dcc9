"""Numbers that the ranks exchange between two steps, so that all of them decide alike."""

import numpy as np

from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.coordination.roll_call import RollCall


class Figures:
    """The exchanges of one compressor's scheduler.

    Each has a name of its own. All ranks must make the same ones in the same order.

    Args:
        compressor: the compressor. Its number is read for each exchange, because the ranks agree on
            it after it is created.

    Attributes:
        calls: how many there have been.
    """

    def __init__(self, compressor):
        self._compressor = compressor
        self.calls = 0

    def call_ranks(self, transport):
        """Wait until all ranks are here."""
        RollCall(transport, self.name("ranks")).wait()

    def slowest(self, transport, seconds):
        """Return the largest of all ranks' numbers, for each of a list of them."""
        parts = self.gathered(transport, np.array(seconds, np.float64).tobytes())
        return np.max([np.frombuffer(part, np.float64) for part in parts], axis=0).tolist()

    def gathered(self, transport, content):
        """Return the bytes that each rank gives, in rank order."""
        size = np.frombuffer(np.uint32(len(content)).tobytes(), dtype=np.uint8)
        data = np.concatenate([size, np.frombuffer(content, dtype=np.uint8)])
        gathered = np.asarray(transport.wait(transport.allgather(data, self.name("figures"))))
        joined, parts = gathered.tobytes(), []
        while joined:
            end = 4 + int(np.frombuffer(joined[:4], np.uint32)[0])
            parts.append(joined[4:end])
            joined = joined[end:]
        return parts

    def of_first(self, transport, content):
        """Return the bytes that the first rank gives; ``content`` is None on the others."""
        data = None if content is None else np.frombuffer(content, dtype=np.uint8)
        agreed = transport.broadcast(data, 0, self.name("plans"))
        return np.asarray(transport.wait(agreed)).tobytes()

    def name(self, label):
        """Return the name of the next exchange."""
        self.calls += 1
        return collective_name(self._compressor.number, f"schedule.{label}.{self.calls}")

    def lasting_name(self, label):
        """Return a name that is the same each time, which saves Horovod work."""
        return collective_name(self._compressor.number, f"schedule.{label}")
