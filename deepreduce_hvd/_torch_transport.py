"""The Transport over Horovod's PyTorch collectives."""

import horovod.torch as hvd

from deepreduce_hvd.communicators import Transport


class HorovodTransport(Transport):
    """Exchanges between the ranks of one Horovod process set; uint8 CPU tensors."""

    def __init__(self, process_set=None):
        self.process_set = hvd.global_process_set if process_set is None else process_set

    @property
    def size(self):
        return self.process_set.size()

    @property
    def rank(self):
        return self.process_set.rank()

    @property
    def ranks(self):
        """The global ranks of the process set."""
        own = self.process_set.ranks
        return list(range(hvd.size())) if own is None else list(own)

    def allgather(self, array, name):
        return hvd.allgather_async(array, name=name, process_set=self.process_set)

    def wait(self, handle):
        return hvd.synchronize(handle)
