"""The exchange of a bucket whose gradients are encoded on GPUs.

It waits for the device at most twice, for any number of gradients, and never in a backward hook.
"""

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
_HEADER = container.HEADER.size


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
        dtype = operators.DTYPES.get(gradient.dtype)
        self._describe(slot.name, gradient.numel(), slot.key, dtype, held=fields is None)
        self.slot = slot
        self.on_device = gradient
        self.fields = fields
        self.replaceable = replaceable
        self.device = gradient.device
        self.ready_on = stream_number(gradient.device)  # computes the gradient
        #: memory that begins with the payload, on the device
        self.room: Any = None
        self.payload: Any = None  # (n,) uint8 tensor, on the device
        self.header: Any = None  # (40,) uint8 NumPy
        if nothing is not None:
            self.payload, self.header = (
                torch.from_numpy(nothing).to(self.device),
                nothing[: container.HEADER.size],
            )

    def take_payload(self, header, size):
        """Keep the payload that has been made, which has ``size`` bytes."""
        self.payload, self.header, self.room = self.room[:size], header, None

    def keep(self, payload):
        """Store the payload's new memory."""
        self.payload = self.slot.payload = payload

    def encode(self, bucket):
        """Return the payload, which is on the host by now, as NumPy."""
        return self.payload.numpy()


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
        self._read: list[tuple] = []  # (members, their reports in a copy to the host)
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
        self._read.append((members, self.reports.start(reports, stream)))

    def finish(self):
        """Read the reports; their copies must be done."""
        for members, reports in self._read:
            results, headers = reports.split([reports.shape[1] - _HEADER, _HEADER], dim=1)
            headers = headers.numpy()
            if operators.any_failed(results) or not _are_payloads(headers):
                for member, result, header in zip(members, results, headers):
                    _finish_one(member, result, header)
                continue
            sizes, _ = container.read_headers(headers)
            for member, header, size in zip(members, headers, sizes.tolist()):
                member.take_payload(header, size)

    def joined(self, stream=None):
        """Concatenate the payloads of each device.

        Args:
            stream: stream that does it, of the only device; None for the streams of the encodings.

        Returns:
            One tuple per device: stream, members that have a payload, their payloads as one tensor.
        """
        groups = []
        for encoded_on, members in self._groups:
            members = [member for member in members if member.payload is not None]
            if not members:
                continue
            payloads = [member.payload for member in members]
            if stream is not None:  # they are complete, but their memory may be used again
                for memory in {one.untyped_storage().data_ptr(): one for one in payloads}.values():
                    memory.record_stream(stream)
            used = encoded_on if stream is None else stream
            with torch.cuda.stream(used):
                groups.append((used, members, torch.cat(payloads)))
        return groups


def _finish_one(member, result, header):
    """Read the report of one member, which may be a failure."""
    try:
        operators.checked(torch.ops.deepreduce.raise_failure, result)
        member.take_payload(header, container.read_header(header)[0])
    except Exception as error:  # the other ranks must get a notice
        member.failure, member.room = error, None


def _keep_parts(members, joined):
    for member, part in zip(members, joined.split([member.payload.numel() for member in members])):
        member.keep(part)


class DeviceAllgather(Allgather):
    """Allgather of payloads that are made on GPUs.

    Args:
        start: as for :class:`DeviceEncodings`.
        device: device of all payloads, if collectives take them from there. Their headers then go
            through the host in a second collective. None if payloads go through pinned memory.
        stream: stream of everything after the encodings; None for that of the encodings. The thread
            that continues the exchange must have it as its current stream.
        refuse: function of a member that could not be encoded. It raises the error that takes the
            place of the exchange. Default: the other ranks get a notice in the exchange.
    """

    def __init__(self, start, device=None, stream=None, refuse=None):
        self.start = start
        self.device = device
        self.stream = stream
        self.refuse = refuse

    def __repr__(self):
        return repr(Allgather())

    def exchange(self, bucket, channel):
        encodings = DeviceEncodings(bucket.members, self.start)
        if encodings.reports:
            yield encodings.reports
        encodings.finish()
        if self.refuse is not None:
            for member in bucket.members:
                if member.failure is not None:
                    self.refuse(member)
        return (
            yield from (self._through_host if self.device is None else self._from_device)(
                encodings, bucket, channel
            )
        )

    def _through_host(self, encodings, bucket, channel):
        copies = CopiesToHost()
        for stream, members, joined in encodings.joined(self.stream):
            _keep_parts(members, copies.start(joined, stream))
        if copies:
            yield copies
        return (yield from super().exchange(bucket, channel))

    def _from_device(self, encodings, bucket, channel):
        payloads, stream = (
            torch.empty(0, dtype=torch.uint8, device=self.device),
            torch.cuda.current_stream(self.device),
        )
        for stream, members, payloads in encodings.joined(self.stream):  # noqa: B007  # the last
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
        messages = _messages(bucket, headers)
        self._divide(bucket, messages, size)
        total = int(messages.bounds[-1])
        if total != gathered.numel():
            raise CorruptPayloadError(
                f"parameter {bucket.name}: expected payloads with {total} bytes in total, got"
                f" {gathered.numel()}"
            )

    def _on_host(self, member):
        return [payload.cpu().numpy() for payload in self.payloads(member)]

    def add_to(self, member, out, scale):
        return add_payloads(self._on_host(member), out, scale)

    def sparse(self, member, scale):
        return decode_sum_sparse(self._on_host(member), self._size_of(member), scale)


def _messages(bucket, headers):
    """Return the Messages of the payloads, by the ``headers`` of PayloadsOnDevice.

    Notices are among the headers, and take no bytes among the payloads.
    """
    entry = _LENGTH.size + _HEADER
    if headers.size % entry == 0:
        rows = headers.reshape(-1, entry)
        lengths = np.frombuffer(_LENGTH.pack(_HEADER), dtype=np.uint8)
        if (rows[:, : _LENGTH.size] == lengths).all() and _are_payloads(rows[:, _LENGTH.size :]):
            sizes, non_finite = container.read_headers(rows[:, _LENGTH.size :])
            return _one_after_another(sizes, non_finite, {})
    found, notices, at = [], {}, 0
    while at < headers.size:
        first = at + _LENGTH.size
        at = first + (_LENGTH.unpack_from(headers, at)[0] if first <= headers.size else 0)
        if not first < at <= headers.size:
            raise CorruptPayloadError(
                f"parameter {bucket.name}: expected headers with {headers.size} bytes in total,"
                f" got one that ends at byte {at}"
            )
        one = headers[first:at]
        if one[: len(container.MAGIC)].tobytes() == container.MAGIC:
            found.append(container.read_header(one))
        else:
            notices[len(found)] = wire.split(one).notices[0]
            found.append((0, False))
    sizes, non_finite = zip(*found) if found else ((), ())
    return _one_after_another(sizes, np.array(non_finite, dtype=bool), notices)


def _are_payloads(entries):
    """Return whether (n, m) uint8 begin with the magic number, as no notice does."""
    magic = np.frombuffer(container.MAGIC, dtype=np.uint8)
    return bool((entries[:, : magic.size] == magic).all())


def _one_after_another(sizes, non_finite, notices):
    """Return the Messages of payloads of these sizes in bytes."""
    return wire.Messages(np.cumsum([0, *sizes]), non_finite, notices)
