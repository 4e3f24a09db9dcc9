"""Compression on the GPU that has the gradients: what stays there, and how sums get back into gradients."""

import weakref

import horovod.torch as hvd
import torch

from deepreduce_hvd import torch as operators
from deepreduce_hvd._torch_copies import CopiesToHost, SideStreams, pinned
from deepreduce_hvd._torch_device_exchange import DeviceAllgather, DeviceMember
from deepreduce_hvd.communicators.allgather import Allgather


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
            sent.append((names, copies.start(torch.stack(rows), torch.cuda.current_stream(device)), copies))
        self._results = {}
        return sent


class DevicePath:
    """Of one compressor. ``why_not``: what keeps it on the host, or None."""

    def __init__(self, compressor):
        self.compressor = compressor
        self.why_not = _why_not(compressor.codec, compressor.memory, compressor.communicator)
        #: whether collectives take payloads from the device
        self.nccl = self.why_not is None and bool(hvd.nccl_built())
        self.side_streams = SideStreams()
        self.forget()

    def forget(self):
        """What sums have not reported yet."""
        self._sums = weakref.WeakKeyDictionary()  # PayloadSum -> _SumOnDevices
        self._sent = []

    def takes(self, tensor):
        """Whether a tensor is compressed where it is."""
        return self.why_not is None and operators.on_device(tensor)

    def home(self, parameter):
        """Where the state of a parameter belongs."""
        return parameter.device if self.takes(parameter) else torch.device("cpu")

    def member(self, slot, gradient, rank):
        flat = gradient.detach().contiguous().view(-1)
        compressor = self.compressor

        def start():
            state = (*slot.state, *[None] * (2 - len(slot.state)))
            return operators.checked(
                torch.ops.deepreduce.start_encode_, flat, *state, compressor.codec.fields(compressor.memory, slot.steps - 1),
                compressor.seed, slot.steps - 1, slot.key, rank,
            )  # fmt: skip

        return DeviceMember(slot, flat, start)

    def communicator(self, slots):
        """What exchanges the payloads of a bucket: on all ranks the same, if their parameters are on devices alike."""
        if not any(self.takes(slot.parameter) for slot in slots):
            return self.compressor.communicator
        devices = {slot.parameter.device for slot in slots}
        return DeviceAllgather(slots[0].parameter.device if self.nccl and len(devices) == 1 else None)

    def decode(self, name, gradient, total, number, scale):
        """The sum in the gradient's shape and dtype, and in its own memory where that can be; it is encoded already."""
        if gradient.dtype == torch.float32 and gradient.is_contiguous():
            out = gradient.detach().view(-1).zero_()
        else:
            out = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        sums = self._sums.get(total)
        if sums is None:
            sums = self._sums[total] = _SumOnDevices(total)
        bytes_there = sums.bytes_on(gradient.device)
        payloads = [bytes_there[message.start : message.end] for message in total.messages[number]]
        fields = self.compressor.codec.fields(self.compressor.memory)
        if sums.add(name, operators.checked(torch.ops.deepreduce.start_decode_sum_, out, payloads, scale, fields)):
            self._sent += sums.send_results()
        return out.view(gradient.shape).to(gradient.dtype)

    def from_host(self, out, gradient):
        """``out`` (d,) float32 in pinned memory, in the gradient's shape and dtype on its device, in its own memory where that can be."""
        in_place = gradient.dtype == torch.float32 and gradient.is_contiguous()
        flat = gradient.detach().view(-1) if in_place else torch.empty(out.shape, dtype=out.dtype, device=gradient.device)
        self.side_streams.to_device(out, flat)
        return flat.view(gradient.shape).to(gradient.dtype)

    def check(self):
        """Raises what went wrong in sums on the device: asked when a round is over, so that nothing waits for the device in between."""
        for sums in self._sums.values():
            self._sent += sums.send_results()
        sent = self._sent
        self.forget()
        for names, results, copies in sent:
            copies.result()
            for name, result in zip(names, results):
                operators.checked(torch.ops.deepreduce.raise_failure, result, name)
