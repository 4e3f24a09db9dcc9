"""Compression on the GPU that has the gradients: what stays there, and how sums get back into
gradients.
"""

import horovod.torch as hvd
import torch

from deepreduce_hvd.communicators.bucket import payload_of_nothing
from deepreduce_hvd.gpu import why_on_host
from deepreduce_hvd.torch import ops as operators
from deepreduce_hvd.torch.cuda.copies import CopiesToHost, SideStreams, pinned
from deepreduce_hvd.torch.cuda.exchange import DeviceAllgather, DeviceMember
from deepreduce_hvd.torch.results import as_float32


class _SumOnDevices:
    """How one bucket's sums are made on its gradients' devices."""

    def __init__(self, total):
        self._gathered = total.gathered  # of all ranks; on the host, if it came through there
        self._left = len(total.messages)
        self._results = {}  # device -> [(name, dr_cuda_result there)]

    def bytes_on(self, device):
        if not isinstance(self._gathered, torch.Tensor):
            host = pinned(self._gathered.size, torch.uint8)
            host.numpy()[:] = self._gathered
            self._gathered = host.to(device, non_blocking=True)
        return self._gathered.to(device)

    def add(self, name, result):
        """Whether this was the last one."""
        self._results.setdefault(result.device, []).append((name, result))
        self._left -= 1
        return self._left == 0

    def send_results(self):
        """[(names, their results on the way to the host, the copies' handle)], of each device."""
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
    """Sums on devices in one step of one optimizer, and what is learnt of them only when they have
    been made.
    """

    def __init__(self, compressor):
        self._compressor = compressor
        self._sums = {}  # PayloadSum -> _SumOnDevices
        self._finite = {}  # device -> (1,) bool there: whether all that was looked at is finite
        self._sent = []
        self._verdicts = []

    def decode(self, name, result, total, number, scale):
        """Fills ``result``, the gradient's own memory where that can be: it is encoded already."""
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
        fields = self._compressor.codec.fields(self._compressor.memory)
        if sums.add(
            name,
            operators.checked(torch.ops.deepreduce.start_decode_sum_, out, payloads, scale, fields),
        ):
            self._sent += self._sums.pop(total).send_results()
        if flat is None:
            result.copy_(out.view(result.shape))

    def look_at(self, result):
        """Notes, without waiting, whether a tensor on a device is finite."""
        finite = torch.isfinite(result).all().view(1)
        known = self._finite.get(result.device)
        self._finite[result.device] = finite if known is None else known & finite

    def send(self):
        """Starts the way to the host of what has been learnt."""
        for sums in self._sums.values():
            self._sent += sums.send_results()
        self._sums = {}
        for device, finite in self._finite.items():
            copies = CopiesToHost()
            self._verdicts.append((copies.start(finite, torch.cuda.current_stream(device)), copies))
        self._finite = {}

    def check(self):
        """Raises what went wrong: asked when a step is over, so that nothing waits for the device
        in between.

        Returns:
            Whether all that was looked at is finite.
        """
        self.send()
        for names, results, copies in self._sent:
            copies.result()
            for name, result in zip(names, results):
                operators.checked(torch.ops.deepreduce.raise_failure, result, name)
        for _, copies in self._verdicts:
            copies.result()
        return all(bool(finite) for finite, _ in self._verdicts)


class DevicePath:
    """Of one compressor. ``why_not``: what keeps it on the host, or None."""

    def __init__(self, compressor):
        self.compressor = compressor
        self.why_not = why_on_host(
            compressor,
            None if operators.HAS_CUDA_OPERATORS else "this installation has no CUDA operators",
            lambda fields: torch.ops.deepreduce.cuda_supports(fields),
        )
        #: whether collectives take payloads from the device
        self.nccl = self.why_not is None and bool(hvd.nccl_built())
        self.side_streams = SideStreams()

    def sums(self):
        """The :class:`DeviceSums` of a new step."""
        return DeviceSums(self.compressor)

    def takes(self, tensor):
        """Whether a tensor is compressed where it is."""
        return self.why_not is None and operators.on_device(tensor)

    def home(self, parameter):
        """Where the state of a parameter belongs."""
        return parameter.device if self.takes(parameter) else torch.device("cpu")

    def member(self, slot, gradient, rank, held):
        flat = gradient.detach().contiguous().view(-1)
        compressor = self.compressor
        if held:
            return DeviceMember(
                slot, flat, nothing=payload_of_nothing(compressor.codec, flat.numel())
            )

        def start():
            state = (*slot.state, *[None] * (2 - len(slot.state)))
            return operators.checked(
                torch.ops.deepreduce.start_encode_, flat, *state, compressor.codec.fields(compressor.memory, slot.steps - 1),
                compressor.seed, slot.steps - 1, slot.key, rank,
            )  # fmt: skip

        return DeviceMember(slot, flat, start)

    def communicator(self, slots):
        """What exchanges the payloads of a bucket: on all ranks the same, if their parameters are
        on devices alike.
        """
        if not any(self.takes(slot.parameter) for slot in slots):
            return self.compressor.communicator
        devices = {slot.parameter.device for slot in slots}
        return DeviceAllgather(devices.pop() if self.nccl and len(devices) == 1 else None)

    def from_host(self, summed, result):
        """Fills ``result``, on a device, from ``summed`` (d,) float32 in pinned memory."""
        flat = as_float32(result)
        if flat is None:
            flat = torch.empty(summed.shape, dtype=summed.dtype, device=result.device)
        self.side_streams.to_device(summed, flat)
        if as_float32(result) is None:
            result.copy_(flat.view(result.shape))
