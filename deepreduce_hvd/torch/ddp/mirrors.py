"""Buckets on a GPU: their gradients are encoded and exchanged on the host, in a mirror of each.

The hook starts the copy of a bucket to its mirror. A thread waits for the copy, encodes the
gradients and gives the job to the driver, which exchanges and decodes them in the mirror. The copy
back is the result of DDP's future: work of the GPU that needs the gradients waits for it, and no
thread does.
"""

import torch

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.cuda.copies import pinned


class Mirrors:
    """The mirrors of one model's buckets, and one pair of streams for each of its GPUs."""

    def __init__(self):
        self._memory = {}  # (device, index of a bucket) -> tensor
        self._streams = {}  # device -> (stream of copies to the host, stream of copies back)

    def copy(self, index, buffer):
        """Start to copy a bucket to the host; return its :class:`Mirror`."""
        device = buffer.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        host = self._memory.get((device, index))
        if host is None or (host.shape, host.dtype) != (buffer.shape, buffer.dtype):
            # DDP has assigned the gradients to other buckets
            host = pinned(buffer.shape, buffer.dtype)
            self._memory[device, index] = host
        return Mirror(buffer, host, *self._streams[device])

    def clear(self):
        """Free the memory."""
        self._memory.clear()


class Mirror:
    """The mirror of a bucket in one step.

    Args:
        buffer: all gradients of the bucket, (n,) on a GPU.
        host: pinned memory of the same shape and dtype.
        to_host, to_device: the streams of copies.

    Attributes:
        host: the mirror.
    """

    def __init__(self, buffer, host, to_host, to_device):
        self.host = host
        self._buffer = buffer
        self._to_device = to_device
        to_host.wait_stream(torch.cuda.current_stream(buffer.device))
        to_host.wait_stream(to_device)  # it may still read the mirror's averages of the last step
        with torch.cuda.stream(to_host):
            host.copy_(buffer, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(to_host)

    def wait(self):
        """Wait until the mirror has the gradients."""
        self._copied.synchronize()

    def view_of(self, gradient):
        """Return the part of the mirror that corresponds to a view of the bucket."""
        start = gradient.storage_offset() - self._buffer.storage_offset()
        return self.host[start : start + gradient.numel()].view(gradient.shape)

    def finish(self, future):
        """Copy the mirror back, as the result of a future that knows the device."""
        with torch.cuda.stream(self._to_device):
            self._buffer.copy_(self.host, non_blocking=True)
            future.set_result(self._buffer)  # it records an event in the current stream


class MirroredJob:
    """The part of a job between the hook and the driver.

    Args:
        job: the :class:`~deepreduce_hvd.torch.ddp.buckets.BucketJob`.
        encode: function that encodes the gradients, in the mirror of the job if it has one.
        driver: the :class:`~deepreduce_hvd.communicators.driver.Driver` of the job.
    """

    def __init__(self, job, encode, driver):
        self._job = job
        self._encode = encode
        self._driver = driver

    def run(self):
        """Wait for the gradients and encode them; called by a thread for all buckets in order."""
        job = self._job
        if job.failure is not None:
            return
        try:
            if job.mirror is not None:
                job.mirror.wait()
            self._encode()
        except Exception as error:
            job.failure = error

    def end(self, error):
        self._driver.put(self._job)


def expect_no_capture(device):
    """Raise InvalidArgumentError while a CUDA graph is captured: it cannot contain exchanges."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgumentError(
            "DDP: expected a backward pass that runs, got one that a CUDA graph captures, which"
            " cannot contain exchanges of the host; do not capture models with a compressor"
        )
