"""Copies between GPUs and pinned host memory that nobody waits for before their content is needed."""

import torch


def pinned(shape, dtype):
    """Host memory that copies run to and from while both sides go on."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class CopiesToHost:
    """Copies on their way; a handle like that of a collective, whose result is None once all have
    come.
    """

    def __init__(self):
        self._events = []

    def __bool__(self):
        return bool(self._events)

    def start(self, tensor, stream):
        """A copy of a GPU's tensor, made in its turn on ``stream``: pinned memory, to be read when
        this handle is done.
        """
        with torch.cuda.stream(stream):
            host = pinned(tensor.shape, tensor.dtype)
            host.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._events.append(event)
        return host

    def query(self):
        return all(event.query() for event in self._events)

    def result(self):
        for event in self._events:
            event.synchronize()


class SideStreams:
    """A stream of each GPU for copies, so that they run beside what its current stream computes."""

    def __init__(self):
        self._streams = {}

    def _after_current(self, device):
        """(The current stream, the side stream, which waits for what the current one has been
        given).
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        current, side = torch.cuda.current_stream(device), self._streams[device]
        side.wait_stream(current)
        return current, side

    def to_host(self, tensor, copies):
        """A copy in pinned memory, one of ``copies``; the tensor must live until it has come."""
        return copies.start(tensor, self._after_current(tensor.device)[1])

    def to_device(self, host, out):
        """Fills ``out``, on a GPU, from pinned memory of its shape and dtype; what the current
        stream is given next waits for it.
        """
        current, side = self._after_current(out.device)
        with torch.cuda.stream(side):
            out.copy_(host, non_blocking=True)
        current.wait_stream(side)
