"""Asynchronous copies between GPUs and pinned host memory."""

import torch


def stream_number(device):
    """Return a number of the current stream of a device; torch.cuda.current_stream takes longer."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def pinned(shape, dtype):
    """Return pinned host memory, which asynchronous copies can use."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


class CopiesToHost:
    """Copies to the host in progress; a handle, like that of a collective.

    Its result is None, once all copies are done.
    """

    def __init__(self):
        self._events = []

    def __bool__(self):
        return bool(self._events)

    def start(self, tensor, stream):
        """Start a copy of a GPU tensor on ``stream``; return the pinned memory that it fills.

        Read the memory only when this handle is done.
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
    """One stream per GPU for copies, which run in parallel to the current stream."""

    def __init__(self):
        self._streams = {}

    def _after_current(self, device):
        """Return the current stream and the side stream.

        The side stream waits for the work that the current stream has so far.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        current, side = torch.cuda.current_stream(device), self._streams[device]
        side.wait_stream(current)
        return current, side

    def to_host(self, tensor, copies):
        """Start a copy to pinned memory as part of ``copies``; return the memory.

        The tensor must live until the copy is done.
        """
        return copies.start(tensor, self._after_current(tensor.device)[1])

    def to_device(self, host, out):
        """Copy pinned memory to ``out``, on a GPU, of the same shape and dtype.

        The current stream's next work waits for the copy.
        """
        current, side = self._after_current(out.device)
        with torch.cuda.stream(side):
            out.copy_(host, non_blocking=True)
        current.wait_stream(side)
