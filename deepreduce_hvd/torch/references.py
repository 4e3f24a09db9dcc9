"""Extra C++ references to tensors in Horovod's collectives, which prevent a deadlock.

When a peer is gone, Horovod's background thread drops its references to the tensors of all pending
collectives, while it holds the lock of its tensor table. Dropping the last C++ reference to a
tensor that Python also knows takes the global interpreter lock (GIL). A thread that starts a
collective holds the GIL and waits for Horovod's lock: a deadlock. An extra C++ reference prevents
this. Python references do not: Horovod's own Python code already keeps one.
"""

import torch
from horovod.torch import mpi_ops

from deepreduce_hvd.torch import ops as operators

_in_flight: set["Kept"] = set()
_handles = None


def _references(tensors):
    """Return an object that holds C++ references to tensors."""
    if operators.WHY_NO_OPERATORS is None:
        return torch.classes.deepreduce.References(tensors)
    return torch.jit.script(tensors)  # a ScriptList; about ten times slower


class Kept:
    """Tensors that one collective reads or writes.

    Call :meth:`hold` before the collective starts, and :meth:`release` after its result has come.
    Tensors of a failed collective are never released; they are kept until Horovod is initialized
    again.
    """

    def __init__(self, *tensors):
        self.tensors = tensors
        self._references = _references(list(tensors))

    def hold(self):
        global _handles
        # hvd.init() makes a new map; the thread of the old one has ended then
        if _handles is not mpi_ops._handle_map:
            _handles = mpi_ops._handle_map
            _in_flight.clear()
        _in_flight.add(self)

    def release(self):
        _in_flight.discard(self)


class Probe(Kept):
    """A probe, (n,) float32, that Horovod reduces.

    Args:
        length: n.
        device: its device.

    Attributes:
        kind: (length, device).
    """

    def __init__(self, length, device):
        tensor = torch.empty(length, dtype=torch.float32, device=device)
        super().__init__(tensor)
        self.kind = length, device
        # a view; writing to it takes a tenth of the time of making a tensor and copying that
        self._numbers = tensor.numpy() if tensor.device.type == "cpu" else None

    def write(self, numbers):
        if self._numbers is None:
            self.tensors[0].copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        else:
            self._numbers[:] = numbers


class Probes:
    """A pool of the probes that Horovod reduces."""

    def __init__(self):
        self._free = {}  # kind -> probes that are not in use

    def take(self, numbers, device):
        """Return a held :class:`Probe` with these numbers on a device."""
        free = self._free.get((len(numbers), device))
        probe = free.pop() if free else Probe(len(numbers), device)
        probe.write(numbers)
        probe.hold()
        return probe

    def give_back(self, probe):
        probe.release()
        self._free.setdefault(probe.kind, []).append(probe)
