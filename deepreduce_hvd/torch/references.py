"""What Horovod works on, kept alive by C++ references of our own until Horovod is done with it.

When a peer is gone, Horovod's background thread drops its references to the tensors of all
collectives that are left, while it holds the lock of its table of them. The last C++ reference to a
tensor that Python knows too takes Python's global lock with it. A thread that is just starting a
collective holds that lock and waits for Horovod's: neither ever goes on. So there must be another
C++ reference at that moment. References from Python do not count, and Horovod's own are of that
kind.
"""

import torch
from horovod.torch import mpi_ops

from deepreduce_hvd.torch import ops as operators

_in_flight: set["Kept"] = set()
_handles = None


def _references(tensors):
    """An object with C++ references to tensors."""
    if operators.WHY_NO_OPERATORS is None:
        return torch.classes.deepreduce.References(tensors)
    return torch.jit.script(tensors)  # a ScriptList, which takes some ten times longer


class Kept:
    """Tensors that one collective reads or writes; :meth:`hold` before it is started,
    :meth:`release` after its result has come.

    What is never released, because the collective failed, is kept until Horovod has been
    initialised anew.
    """

    def __init__(self, *tensors):
        self.tensors = tensors
        self._references = _references(list(tensors))

    def hold(self):
        global _handles
        # hvd.init() makes a new one; the thread that worked for the old one has ended
        if _handles is not mpi_ops._handle_map:
            _handles = mpi_ops._handle_map
            _in_flight.clear()
        _in_flight.add(self)

    def release(self):
        _in_flight.discard(self)


class Probes:
    """The probes that Horovod reduces, used again and again."""

    def __init__(self):
        self._free = {}  # device -> those that are not in use

    def take(self, numbers, device):
        """A :class:`Kept` tensor of these ``numbers``, (4,) float32, on a device, in flight."""
        free = self._free.get(device)
        probe = free.pop() if free else Kept(torch.empty_like(numbers, device=device))
        probe.tensors[0].copy_(numbers)
        probe.hold()
        return probe

    def give_back(self, probe):
        probe.release()
        self._free.setdefault(probe.tensors[0].device, []).append(probe)
