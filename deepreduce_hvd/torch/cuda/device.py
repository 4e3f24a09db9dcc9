"""Compression of gradients on their GPU, and the sums on GPUs."""

import horovod.torch as hvd
import torch

from deepreduce_hvd.adapters.gpu import BaseDevicePath
from deepreduce_hvd.communicators.bucket import payload_of_nothing
from deepreduce_hvd.numpy_backend import residual_and_velocity
from deepreduce_hvd.torch import ops as operators
from deepreduce_hvd.torch.cuda.copies import CopiesToHost, SideStreams, pinned
from deepreduce_hvd.torch.cuda.exchange import DeviceAllgather, DeviceMember
from deepreduce_hvd.torch.results import as_float32


class _SumOnDevices:
    """The sums of one bucket, made on its gradients' devices."""

    def __init__(self, total):
        self._gathered = total.gathered  # payloads of all ranks, on the device or the host
        self._left = len(total.messages)
        self._results = {}  # device -> [(name, dr_cuda_result there)]

    def bytes_on(self, device):
        if not isinstance(self._gathered, torch.Tensor):
            host = pinned(self._gathered.size, torch.uint8)
            host.numpy()[:] = self._gathered
            self._gathered = host.to(device, non_blocking=True)
        return self._gathered.to(device)

    def add(self, name, result):
        """Store a result; return whether it was the last one of the bucket."""
        self._results.setdefault(result.device, []).append((name, result))
        self._left -= 1
        return self._left == 0

    def send_results(self):
        """Start copies of the results to the host.

        Returns:
            One tuple per device: names, pinned rows of results, handle of the copies.
        """
        sent = []
        for device, results in self._results.items():
            names, rows = zip(*results)
            copies = CopiesToHost()
            sent.append(
                (names, copies.start(torch.stack(rows), torch.cuda.current_stream(device)), copies)
            )
        self._results = {}
        return sent


class DeviceSums:
    """Sums on devices in one step of one optimizer.

    Errors and non-finite results are checked only when the step is over.
    """

    def __init__(self):
        self._sums = {}  # GatheredPayloads -> _SumOnDevices
        self._finite = {}  # device -> (1,) bool there: whether all checked tensors are finite
        self._sent = []
        self._verdicts = []

    def decode(self, slot, result, total, number, scale):
        """Fill ``result`` with the sum of one gradient.

        ``result`` may be the gradient's own memory, because the gradient is encoded already.
        """
        flat = as_float32(result)
        out = (
            torch.zeros(result.numel(), dtype=torch.float32, device=result.device)
            if flat is None
            else flat.zero_()
        )
        sums = self._sums.get(total)
        if sums is None:
            sums = self._sums[total] = _SumOnDevices(total)
        bytes_there = sums.bytes_on(result.device)
        payloads = [bytes_there[message.start : message.end] for message in total.messages[number]]
        fields = slot.policy.codec.fields(slot.policy.memory)
        if sums.add(
            slot.name,
            operators.checked(torch.ops.deepreduce.start_decode_sum_, out, payloads, scale, fields),
        ):
            self._sent += self._sums.pop(total).send_results()
        if flat is None:
            result.copy_(out.view(result.shape))

    def look_at(self, result):
        """Record, without waiting, whether a tensor on a device is finite."""
        finite = torch.isfinite(result).all().view(1)
        known = self._finite.get(result.device)
        self._finite[result.device] = finite if known is None else known & finite

    def send(self):
        """Start copies of results and finite flags to the host."""
        for sums in self._sums.values():
            self._sent += sums.send_results()
        self._sums = {}
        for device, finite in self._finite.items():
            copies = CopiesToHost()
            self._verdicts.append((copies.start(finite, torch.cuda.current_stream(device)), copies))
        self._finite = {}

    def check(self):
        """Wait for the results and raise failures; called when a step is over.

        Returns:
            Whether all recorded tensors are finite.
        """
        self.send()
        for names, results, copies in self._sent:
            copies.result()
            for name, result in zip(names, results):
                operators.checked(torch.ops.deepreduce.raise_failure, result, name)
        for _, copies in self._verdicts:
            copies.result()
        return all(bool(finite) for finite, _ in self._verdicts)


class DevicePath(BaseDevicePath):
    """The path of one compressor for gradients on GPUs."""

    def __init__(self, compressor):
        super().__init__(
            compressor,
            None if operators.HAS_CUDA_OPERATORS else "this installation has no CUDA operators",
            # without operators, the name does not exist
            lambda fields: torch.ops.deepreduce.cuda_supports(fields),
            hvd.nccl_built,
        )
        self.side_streams = SideStreams()
        self._encodings = {}  # names of members -> BucketEncodings

    def sums(self):
        """Return the :class:`DeviceSums` of a new step."""
        return DeviceSums()

    def takes(self, tensor):
        """Return whether a tensor is compressed on its device."""
        return self.why_not is None and operators.on_device(tensor)

    def home(self, parameter):
        """Return the device for the state of a parameter."""
        return parameter.device if self.takes(parameter) else torch.device("cpu")

    def member(self, slot, gradient, held):
        flat = gradient.detach().contiguous().view(-1)
        codec, memory = slot.policy.codec, slot.policy.memory
        if held:
            return DeviceMember(slot, flat, nothing=payload_of_nothing(codec, flat.numel()))
        return DeviceMember(slot, flat, codec.fields(memory, slot.steps - 1))

    def start_encodings(self, members):
        """Start to encode gradients of one device, on its current stream.

        Args:
            members: list of :class:`~deepreduce_hvd.torch.cuda.exchange.DeviceMember`. A list with
                the same names as in earlier steps is started faster.

        Returns:
            A list of uint8 tensors, which will begin with the payloads, and (n, m) uint8: for each
            member a dr_cuda_result, followed by the payload's header. They are valid until the
            next call for the same members.
        """
        names = tuple(member.name for member in members)
        if names not in self._encodings:
            self._encodings[names] = torch.classes.deepreduce.BucketEncodings(list(names))
        slots = [member.slot for member in members]
        residuals, velocities = zip(*[residual_and_velocity(slot.state) for slot in slots])
        return operators.checked(
            self._encodings[names].start,
            [member.on_device for member in members], list(residuals), list(velocities),
            [number for member in members for number in member.fields],
            self.compressor.seed, [slot.steps - 1 for slot in slots], [slot.key for slot in slots],
            hvd.rank(),
        )  # fmt: skip

    def communicator(self, slots, planned=None):
        """Return the communicator for the payloads of a bucket.

        Args:
            slots: slots of the bucket.
            planned: the communicator on the host; None for the compressor's.

        Returns:
            A communicator. It is the same on all ranks if their parameters are on the same kinds of
            devices.
        """
        if not any(self.takes(slot.parameter) for slot in slots):
            return self.compressor.communicator if planned is None else planned
        devices = {slot.parameter.device for slot in slots}
        return DeviceAllgather(
            self.start_encodings, devices.pop() if self.nccl and len(devices) == 1 else None
        )

    def from_host(self, summed, result):
        """Fill ``result``, on a device, from ``summed``, (d,) float32 in pinned memory."""
        flat = as_float32(result)
        if flat is None:
            flat = torch.empty(summed.shape, dtype=summed.dtype, device=result.device)
        self.side_streams.to_device(summed, flat)
        if as_float32(result) is None:
            result.copy_(flat.view(result.shape))
