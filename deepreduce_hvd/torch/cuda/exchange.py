"""The exchange of a bucket whose gradients are encoded on GPUs.

It waits for the device at most twice, for any number of gradients, and never in a backward hook.
"""

import functools
import struct
from typing import Any

import numpy as np
import torch

from deepreduce_hvd import container
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.allgather import Allgather
from deepreduce_hvd.communicators.bucket import BucketMember
from deepreduce_hvd.communicators.sums import GatheredPayloads
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.numpy_backend import add_payloads, decode_sum_sparse
from deepreduce_hvd.torch import ops as operators
from deepreduce_hvd.torch.cuda.copies import CopiesToHost, stream_number

_LENGTH = struct.Struct("<I")


class DeviceMember(BucketMember):
    """A gradient on a GPU, with its state there.

    Args:
        slot: slot of the parameter.
        gradient: (d,) tensor on a GPU.
        fields: the numbers of its codec and memory.
        replaceable: whether ``gradient`` has the memory of the parameter's gradient, in float32, so
            that the sum can replace it.
        nothing: the payload of a held member, (n,) uint8 NumPy; None for other members.
    """

    def __init__(self, slot, gradient, fields=None, replaceable=False, nothing=None):
        super().__init__(
            slot.name, _shape_only(gradient.numel()), (), slot.key, held=fields is None
        )
        self.slot = slot
        self.on_device = gradient
        self.fields = fields
        self.replaceable = replaceable
        self.device = gradient.device
        self.ready_on = stream_number(gradient.device)  # computes the gradient
        #: memory that begins with the payload, on the device
        self.room: Any = None
        self.payload: Any = None  # (n,) uint8 tensor, on the device
        self.header = None  # (40,) uint8 NumPy
        if nothing is not None:
            self.payload, self.header = (
                torch.from_numpy(nothing).to(self.device),
                nothing[: container.HEADER.size],
            )

    def finish(self, report):
        """Read the report once it is on the host."""
        result, header = report[: -container.HEADER.size], report[-container.HEADER.size :].numpy()
        try:
            operators.checked(torch.ops.deepreduce.raise_failure, result)
            total_bytes, _ = container.read_header(header)
            self.payload, self.header = self.room[:total_bytes], header
        except Exception as error:  # the other ranks must get a notice
            self.failure = error
        self.room = None

    def keep(self, payload):
        """Store the payload's new memory."""
        self.payload = self.slot.payload = payload

    def encode(self, bucket):
        """Return the payload, which is on the host by now, as NumPy."""
        return self.payload.numpy()


@functools.cache
def _shape_only(d):
    """Return (d,) float32 NumPy without memory, for a gradient that is on a GPU."""
    return np.broadcast_to(np.float32(0), d)


class DeviceEncodings:
    """The encodings of a bucket's members on GPUs.

    All start before the first one is waited for.

    Args:
        members: the bucket's members.
        start: function of the members on one device that starts their encodings on its current
            stream; see :meth:`DevicePath.start_encodings
            <deepreduce_hvd.torch.cuda.device.DevicePath.start_encodings>`.
    """

    def __init__(self, members, start):
        self.reports = CopiesToHost()
        self._groups = []  # (stream, its members)
        self._read: list[tuple] = []  # (member, its report in a copy to the host)
        on_device = [member for member in members if isinstance(member, DeviceMember)]
        for device in dict.fromkeys(member.device for member in on_device):
            there = [member for member in on_device if member.device == device]
            stream = torch.cuda.current_stream(device)
            for member in there:
                if member.ready_on != stream_number(device):
                    stream.wait_stream(torch.cuda.ExternalStream(member.ready_on, device))
                    member.on_device.record_stream(stream)
            self._start([member for member in there if not member.held], start, stream)
            self._groups.append((stream, there))

    def _start(self, members, start, stream):
        if not members:
            return
        try:
            rooms, reports = start(members)
        # catch everything: the other ranks must get a notice instead of waiting
        except Exception as error:
            for member in members:
                member.failure = error
            return
        for member, room in zip(members, rooms):
            member.room = room
        self._read += zip(members, self.reports.start(reports, stream))

    def finish(self):
        """Read the reports; their copies must be done."""
        for member, report in self._read:
            member.finish(report)

    def joined(self):
        """Concatenate the payloads of each device.

        Returns:
            One tuple per device: stream, members that have a payload, their payloads as one tensor.
        """
        groups = []
        for stream, members in self._groups:
            members = [member for member in members if member.payload is not None]
            if members:
                with torch.cuda.stream(stream):
                    groups.append(
                        (stream, members, torch.cat([member.payload for member in members]))
                    )
        return groups


def _keep_parts(members, joined):
    for member, part in zip(members, joined.split([member.payload.numel() for member in members])):
        member.keep(part)


class DeviceAllgather(Allgather):
    """Allgather of payloads that are made on GPUs.

    Args:
        start: as for :class:`DeviceEncodings`.
        device: device of all payloads, if collectives take them from there. Their headers then go
            through the host in a second collective. None if payloads go through pinned memory.
    """

    def __init__(self, start, device=None):
        self.start = start
        self.device = device

    def __repr__(self):
        return repr(Allgather())

    def exchange(self, bucket, channel):
        encodings = DeviceEncodings(bucket.members, self.start)
        if encodings.reports:
            yield encodings.reports
        encodings.finish()
        return (
            yield from (self._through_host if self.device is None else self._from_device)(
                encodings, bucket, channel
            )
        )

    def _through_host(self, encodings, bucket, channel):
        copies = CopiesToHost()
        for stream, members, joined in encodings.joined():
            _keep_parts(members, copies.start(joined, stream))
        if copies:
            yield copies
        return (yield from super().exchange(bucket, channel))

    def _from_device(self, encodings, bucket, channel):
        payloads, stream = (
            torch.empty(0, dtype=torch.uint8, device=self.device),
            torch.cuda.current_stream(self.device),
        )
        for stream, members, payloads in encodings.joined():  # noqa: B007  # the last stream
            _keep_parts(members, payloads)
        refusal = channel.size_notice(payloads.nbytes, channel.size)
        if refusal is not None:
            payloads = payloads[:0]
        entries = []
        for member in bucket.members:
            header = member.header if refusal is None else refusal
            if member.failure is not None:
                header = wire.notice(member.failure)
            entries += [np.frombuffer(_LENGTH.pack(header.size), dtype=np.uint8), header]
        with torch.cuda.stream(stream):  # the collective waits for the stream's work so far
            # start both before waiting for either
            headers, sums = channel.allgather(np.concatenate(entries)), channel.allgather(payloads)
        headers = yield headers
        gathered = yield sums
        return PayloadsOnDevice(bucket, headers, gathered, channel.size)


class PayloadsOnDevice(GatheredPayloads):
    """Payloads of every rank on a device.

    Args:
        bucket: the :class:`Bucket`.
        headers: (n,) uint8; for each rank and member, the length and the bytes of a header or
            notice.
        gathered: (m,) uint8 tensor of all payloads.
        size: number of ranks.
    """

    def __init__(self, bucket, headers, gathered, size):
        self.gathered = gathered
        spans, at, start = [], 0, 0
        while at < headers.size:
            first = at + _LENGTH.size
            at = first + (_LENGTH.unpack_from(headers, at)[0] if first <= headers.size else 0)
            if not first < at <= headers.size:
                raise CorruptPayloadError(
                    f"parameter {bucket.name}: expected headers with {headers.size} bytes in total,"
                    f" got one that ends at byte {at}"
                )
            span = _span(headers[first:at], start)
            spans.append(span)
            start = span.end
        self._divide(bucket, spans, size)
        if start != gathered.numel():
            raise CorruptPayloadError(
                f"parameter {bucket.name}: expected payloads with {start} bytes in total, got"
                f" {gathered.numel()}"
            )

    def _on_host(self, member):
        return [payload.cpu().numpy() for payload in self.payloads(member)]

    def add_to(self, member, out, scale):
        return add_payloads(self._on_host(member), out, scale)

    def sparse(self, member, scale):
        return decode_sum_sparse(self._on_host(member), self._size_of(member), scale)


def _span(entry, start):
    """Return the ReceivedMessage of the payload that starts at ``start`` and has this header.

    A notice has no payload.
    """
    if entry[: len(container.MAGIC)].tobytes() != container.MAGIC:
        (message,) = wire.split(entry)
        return wire.ReceivedMessage(start, start, False, message.notice)
    total_bytes, non_finite = container.read_header(entry)
    return wire.ReceivedMessage(start, start + total_bytes, non_finite, None)
