"""Compression on the GPU that has the gradients: what stays there, and how payloads get from there to the collective and back."""

import struct
import weakref

import horovod.torch as hvd
import numpy as np
import torch

from deepreduce_hvd import payload as container, torch as operators, wire
from deepreduce_hvd.codec import decode_sum_numpy, decode_sum_sparse
from deepreduce_hvd.communicators.allgather import Allgather
from deepreduce_hvd.communicators.job import Member
from deepreduce_hvd.communicators.sums import PayloadSum
from deepreduce_hvd.errors import CorruptPayload, PeerFailed

_LENGTH = struct.Struct("<I")


def _why_not(codec, memory, communicator):
    """What keeps gradients from being compressed on their GPU, or None."""
    if not operators.HAS_CUDA_OPERATORS:
        return "this installation has no CUDA operators (docs/gpu.md says how to build them)"
    if type(communicator) is not Allgather:
        return f"{communicator!r} works on the host"
    if not codec.native:
        return f"{codec!r} is not all built in"
    if not torch.ops.deepreduce.cuda_supports(codec.fields(memory)):
        return f"of {codec!r} the host must do a part (docs/gpu.md says which codecs, and why)"
    return None


class DeviceMember(Member):
    """A gradient on a GPU, with its state there. ``encode_on_device()`` returns (payload there, header on the host)."""

    def __init__(self, slot, encode_on_device):
        d = slot.parameter.numel()
        super().__init__(slot.name, np.broadcast_to(np.float32(0), d), (), slot.key, encode=self._encode_to_host)
        self.slot = slot
        self.encode_on_device = encode_on_device

    def _encode_to_host(self):
        payload, _ = self.encode_on_device()
        # kept on the host, where stats() wants it
        self.slot.payload = _pinned(payload.numel()).copy_(payload)
        return self.slot.payload.numpy()


class DevicePath:
    """Of one compressor. ``why_not``: what keeps it on the host, or None."""

    def __init__(self, compressor):
        self.compressor = compressor
        self.why_not = _why_not(compressor.codec, compressor.memory, compressor.communicator)
        #: whether collectives take payloads from the device
        self.nccl = self.why_not is None and bool(hvd.nccl_built())
        self._gathered = weakref.WeakKeyDictionary()  # PayloadSum -> its bytes on the device
        self._started = []  # (result on its way to the host, event that it has come) of sums

    def takes(self, tensor):
        """Whether a tensor is compressed where it is."""
        return self.why_not is None and operators.on_device(tensor)

    def home(self, parameter):
        """Where the state of a parameter belongs."""
        return parameter.device if self.takes(parameter) else torch.device("cpu")

    def member(self, slot, gradient, rank):
        flat = gradient.detach().contiguous().view(-1)

        def encode():
            compressor = self.compressor
            state = (*slot.state, *[None] * (2 - len(slot.state)))
            payload, header = operators.checked(
                torch.ops.deepreduce.encode_with_header, flat, *state, None, compressor.codec.fields(compressor.memory, slot.steps - 1),
                compressor.seed, slot.steps - 1, slot.key, rank,
            )  # fmt: skip
            slot.payload = payload
            return payload, header.numpy()

        return DeviceMember(slot, encode)

    def communicator(self, slots):
        """What exchanges the payloads of a bucket: on all ranks the same, if their parameters are on devices alike."""
        devices = {slot.parameter.device for slot in slots}
        if self.nccl and len(devices) == 1 and self.takes(slots[0].parameter):
            return DeviceAllgather(slots[0].parameter.device)
        return self.compressor.communicator

    def decode(self, gradient, total, number, scale):
        """The sum in the gradient's shape and dtype, and in its own memory where that can be; it is encoded already."""
        if gradient.dtype == torch.float32 and gradient.is_contiguous():
            out = gradient.detach().view(-1).zero_()
        else:
            out = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        bytes_there = self._bytes_there(total, gradient.device)
        payloads = [bytes_there[message.start : message.end] for message in total.messages[number]]
        fields = self.compressor.codec.fields(self.compressor.memory)
        result = operators.checked(torch.ops.deepreduce.start_decode_sum_, out, payloads, scale, fields)
        with torch.cuda.device(gradient.device):
            came = torch.cuda.Event()
            on_host = _pinned(result.numel()).copy_(result, non_blocking=True)
            came.record()
        self._started.append((on_host, came))
        return out.view(gradient.shape).to(gradient.dtype)

    def _bytes_there(self, total, device):
        if isinstance(total.gathered, torch.Tensor):
            return total.gathered
        found = self._gathered.get(total)
        if found is None:
            pinned = _pinned(total.gathered.size)
            pinned.numpy()[:] = total.gathered
            found = self._gathered[total] = pinned.to(device, non_blocking=True)
        return found.to(device)

    def check(self):
        """Raises what went wrong in sums on the device: asked when a round is over, so that nothing waits for the device in between."""
        while self._started:
            on_host, came = self._started.pop()
            came.synchronize()
            operators.checked(torch.ops.deepreduce.raise_failure, on_host)


class DeviceAllgather(Allgather):
    """Allgather of payloads on a device, by collectives that take them from there; headers go beside them, through the host."""

    def __init__(self, device):
        self.device = device

    def exchange(self, job, channel):
        payloads, entries = [torch.empty(0, dtype=torch.uint8, device=self.device)], []
        for member in job.members:
            try:
                if member.failure is not None:
                    raise member.failure
                payload, header = member.encode_on_device()
                payloads.append(payload)
            except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
                member.failure = error
                header = wire.notice(error)
            entries += [np.frombuffer(_LENGTH.pack(header.size), dtype=np.uint8), header]
        # both are on their way before either is waited for
        headers, sums = channel.allgather(np.concatenate(entries)), channel.allgather(torch.cat(payloads))
        headers = yield headers
        gathered = yield sums
        return DeviceSum(job, headers, gathered, channel.size)


class DeviceSum(PayloadSum):
    """Payloads of every rank on a device. ``headers``: of each rank, each member, the length and bytes of a header or a notice."""

    def __init__(self, job, headers, gathered, size):
        self._offsets = job.offsets
        self.gathered = gathered
        spans, at, start = [], 0, 0
        while at < headers.size:
            first = at + _LENGTH.size
            at = first + (_LENGTH.unpack_from(headers, at)[0] if first <= headers.size else 0)
            if not first < at <= headers.size:
                raise CorruptPayload(f"parameter {job.name}: expected headers of {headers.size} bytes in all, got one that ends at {at}")
            span = _span(headers[first:at], start)
            spans.append(span)
            start = span.end
        count = len(job.members)
        if len(spans) != size * count:
            raise CorruptPayload(f"parameter {job.name}: expected {count} headers from each of {size} ranks, got {len(spans)} in all")
        self.messages = [spans[number::count] for number in range(count)]
        for member, messages in zip(job.members, self.messages):
            try:
                wire.raise_notices(member.name, messages)
            except PeerFailed as error:
                raise error from member.failure
        if start != gathered.numel():
            raise CorruptPayload(f"parameter {job.name}: expected payloads of {start} bytes in all, got {gathered.numel()}")

    def _on_host(self, member):
        return [payload.cpu().numpy() for payload in self.payloads(member)]

    def add_to(self, member, out, scale):
        decode_sum_numpy(self._on_host(member), out, scale)

    def sparse(self, member, scale):
        return decode_sum_sparse(self._on_host(member), int(np.diff(self._offsets)[member]), scale)


def _span(entry, start):
    """Where the payload of a header lies that starts at ``start``; a notice, which has none."""
    if entry[: len(container.MAGIC)].tobytes() != container.MAGIC:
        (message,) = wire.split(entry)
        return wire.Message(start, start, False, message.notice)
    total_bytes, non_finite = container.read_header(entry)
    return wire.Message(start, start + total_bytes, non_finite, None)


def _pinned(size):
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
