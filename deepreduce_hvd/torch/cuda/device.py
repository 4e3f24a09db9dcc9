"""Compression of gradients on their GPU, and the sums on GPUs."""

import torch

from deepreduce_hvd.adapters.gpu import BaseDevicePath
from deepreduce_hvd.communicators.bucket import payload_of_nothing
from deepreduce_hvd.numpy_backend import residual_and_velocity
from deepreduce_hvd.torch import ops as operators
from deepreduce_hvd.torch.cuda.copies import CopiesToHost, SideStreams, pinned
from deepreduce_hvd.torch.cuda.exchange import DeviceAllgather, DeviceMember
from deepreduce_hvd.torch.ops import DTYPES
from deepreduce_hvd.torch.results import as_float32


class _BucketSums:
    """The sums of gradients of a bucket on one device, all started together.

    Args:
        total: the bucket's :class:`~deepreduce_hvd.communicators.sums.GatheredPayloads`.
        numbers: numbers of the bucket's members, which have one policy.
        device: the device.
        scale: factor of the sums.
        in_place: whether sums may replace gradients.
        calls: torch.classes.deepreduce.BucketSums, of earlier steps of the same gradients.

    Attributes:
        names: names of the parameters.
        results: (n, m) uint8 on the device: a dr_cuda_result for each.
    """

    def __init__(self, total, numbers, device, scale, in_place, calls):
        self.scale = scale
        members = [total.members[number] for number in numbers]
        self.names = [member.name for member in members]
        self._outs = dict(zip(numbers, _zeros_for(members, device, in_place)))
        starts, ends = total.starts[numbers].ravel(), total.ends[numbers].ravel()
        policy = members[0].slot.policy
        self.results = operators.checked(
            calls.start,
            list(self._outs.values()),
            _bytes_on(device, total.gathered),
            starts.tolist(),
            (ends - starts).tolist(),
            scale,
            policy.codec.fields(policy.memory),
        )

    def take(self, number):
        """Return the sum of a member, (d,) float32. It can be taken once."""
        return self._outs.pop(number)

    def has(self, number, scale):
        """Return whether the sum of a member is here, with this factor, and was not taken yet."""
        return self.scale == scale and number in self._outs


def _zeros_for(members, device, in_place):
    """Return zeros for the sums, (d,) float32 each; with ``in_place``, in gradients if possible."""
    replaced = [member.on_device for member in members if in_place and member.replaceable]
    if replaced:
        torch._foreach_zero_(replaced)
    others = [member for member in members if not (in_place and member.replaceable)]
    sizes = [member.on_device.numel() for member in others]
    apart = iter(torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes))
    return [
        member.on_device if in_place and member.replaceable else next(apart) for member in members
    ]


def _bytes_on(device, gathered):
    """Return the payloads of all ranks, which are on a device or the host, on this device."""
    if not isinstance(gathered, torch.Tensor):
        host = pinned(gathered.size, torch.uint8)
        host.numpy()[:] = gathered
        gathered = host
    return gathered.to(device, non_blocking=True)


class DeviceSums:
    """Sums on devices in one step of one optimizer.

    Errors and non-finite results are checked only when the step is over.

    Args:
        calls_of: function that takes the names of a bucket's parameters and a device, and returns
            their torch.classes.deepreduce.BucketSums, which lasts over all steps.
    """

    def __init__(self, calls_of):
        self._calls_of = calls_of
        self._sums = {}  # (GatheredPayloads, device) -> _BucketSums
        self._finite = {}  # device -> (1,) bool there: whether all checked tensors are finite
        self._sent = []
        self._verdicts = []

    def decode(self, result, total, number, scale, in_place):
        """Fill ``result`` with the sum of one gradient.

        The sums of the whole bucket start together with the first one that is requested.

        Args:
            result: a tensor on a device. It may be the gradient's own memory, because the gradient
                is encoded already.
            total: sum of the gradient's bucket.
            number: number of the gradient's bucket member.
            scale: factor of the sum.
            in_place: whether sums may replace all gradients of the bucket.
        """
        key = total, result.device
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = self._start(total, result.device, scale, in_place)
        if not sums.has(number, scale):  # another operation than that of the first one
            sums = self._sums[key] = self._start(total, result.device, scale, in_place=False)
        _fill(result, sums.take(number))

    def decode_some(self, results, total, scale):
        """Fill ``results`` with the sums of gradients of one policy, on the current stream.

        Args:
            results: {number of a bucket's member: tensor}, on one device. The tensors may be the
                gradients' own memory.
            total: sum of the bucket.
            scale: factor of the sums.
        """
        device = next(iter(results.values())).device
        sums = self._start(total, device, scale, True, list(results))
        for number, result in results.items():
            _fill(result, sums.take(number))

    def _start(self, total, device, scale, in_place, numbers=None):
        """Start the sums of some members of a bucket; by default of all that are on the device."""
        if numbers is None:
            numbers = [
                number
                for number, member in enumerate(total.members)
                if isinstance(member, DeviceMember) and member.device == device
            ]
        calls = self._calls_of(tuple(total.members[number].name for number in numbers), device)
        sums = _BucketSums(total, numbers, device, scale, in_place, calls)
        copies = CopiesToHost()
        rows = copies.start(sums.results, torch.cuda.current_stream(device))
        self._sent.append((sums.names, rows, copies))
        return sums

    def look_at(self, result):
        """Record, without waiting, whether a tensor on a device is finite."""
        finite = torch.isfinite(result).all().view(1)
        known = self._finite.get(result.device)
        self._finite[result.device] = finite if known is None else known & finite

    def send(self):
        """Start copies of finite flags to the host. No result is requested after this."""
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
            operators.raise_failures(results, names)
        for _, copies in self._verdicts:
            copies.result()
        return all(bool(finite) for finite, _ in self._verdicts)


def _fill(result, summed):
    """Copy a sum, (d,) float32, to ``result``, unless it is there already."""
    if as_float32(result) is None or result.data_ptr() != summed.data_ptr():
        result.copy_(summed.view(result.shape))


class DevicePath(BaseDevicePath):
    """The path of one compressor for gradients on GPUs.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        nccl_built: function that returns whether collectives take payloads from the device.
        rank: function that returns the number of this rank for random choices.
    """

    def __init__(self, compressor, nccl_built, rank):
        super().__init__(
            compressor,
            None if operators.HAS_CUDA_OPERATORS else "this installation has no CUDA operators",
            # without operators, the name does not exist
            lambda fields: torch.ops.deepreduce.cuda_supports(fields),
            nccl_built,
        )
        self._rank = rank
        self.side_streams = SideStreams()
        self._encodings = {}  # names of members -> BucketEncodings
        self._sums = {}  # names of a bucket's members, device -> BucketSums

    def sums(self):
        """Return the :class:`DeviceSums` of a new step."""
        return DeviceSums(self._calls_of)

    def _calls_of(self, *bucket):
        if bucket not in self._sums:
            self._sums[bucket] = torch.classes.deepreduce.BucketSums()
        return self._sums[bucket]

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
            nothing = payload_of_nothing(codec, flat.numel(), DTYPES[flat.dtype])
            return DeviceMember(slot, flat, nothing=nothing)
        return DeviceMember(
            slot, flat, codec.fields(memory, slot.steps - 1), as_float32(gradient) is not None
        )

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
        residuals, velocities = zip(*[residual_and_velocity(slot.encoder_state) for slot in slots])
        return operators.checked(
            self._encodings[names].start,
            [member.on_device for member in members], list(residuals), list(velocities),
            [number for member in members for number in member.fields],
            self.compressor.seed, [slot.steps - 1 for slot in slots], [slot.key for slot in slots],
            self._rank(),
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
