"""Allgather: every rank receives every payload."""

from deepreduce_hvd.communicators.base import Communicator


class Allgather(Communicator):
    """One allgather a parameter; bytes received grow with the number of ranks (DeepReduce; GRACE's allgather)."""

    def start(self, transport, payload, name):
        return transport.allgather(payload, name)

    def finish(self, transport, handle):
        return transport.wait(handle)
