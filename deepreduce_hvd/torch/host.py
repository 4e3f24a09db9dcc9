"""Gradients that are encoded, and sums that are made, on the host."""

import functools

import torch

from deepreduce_hvd.communicators.bucket import BucketMember, payload_of_nothing
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.ops import DTYPES, encode_flat
from deepreduce_hvd.torch.results import as_float32
from deepreduce_hvd.user_warnings import warn


class HostMember(BucketMember):
    """A bucket member whose gradient is a tensor on the host; PyTorch's operator encodes it.

    Args:
        slot: slot of the parameter.
        gradient: (d,) contiguous tensor on the host.
        held: as for :class:`~deepreduce_hvd.communicators.bucket.BucketMember`.

    Raises:
        InvalidArgumentError: the gradient's dtype is not one of docs/format.md.
    """

    def __init__(self, slot, gradient, held):
        dtype = DTYPES.get(gradient.dtype)
        if dtype is None:
            raise InvalidArgumentError(
                f"gradient: expected {', '.join(map(str, DTYPES))}, got {gradient.dtype}"
            )
        self._describe(slot.name, gradient.numel(), slot.key, dtype, held)
        self._slot = slot
        self._gradient = gradient
        self._step = slot.steps - 1

    # made when they are read: only communicators that select elements do so

    @functools.cached_property
    def gradient(self):  # type: ignore[override]
        # NumPy has no bfloat16: pass the bits as int16
        is_bfloat16 = self._gradient.dtype == torch.bfloat16
        return (self._gradient.view(torch.int16) if is_bfloat16 else self._gradient).numpy()

    @functools.cached_property
    def state(self):  # type: ignore[override]
        return tuple(part.numpy() for part in self._slot.encoder_state)

    @functools.cached_property
    def threshold(self):  # type: ignore[override]
        return self._slot.threshold.numpy()

    def encode(self, bucket):
        """Return the payload, (n,) uint8 NumPy. The slot keeps it for the statistics."""
        slot, codec = self._slot, bucket.codec
        if self.held:
            slot.payload = torch.from_numpy(payload_of_nothing(codec, self.d, self.dtype))
        else:
            slot.payload = encode_flat(
                codec, bucket.memory, self._gradient, slot.encoder_state, slot.threshold,
                bucket.seed, self._step, slot.key, bucket.rank,
            )  # fmt: skip
        return slot.payload.numpy()


class HostPath:
    """The path of one compressor for gradients that are compressed on the host.

    They can be on the host or on a GPU.

    Args:
        device_path: the compressor's :class:`~deepreduce_hvd.torch.cuda.device.DevicePath`, for
            copies from and to GPUs.
    """

    def __init__(self, device_path):
        self._device_path = device_path
        self._warned = False

    def member(self, slot, tensor, copies, held):
        """Return the bucket member of a gradient.

        Args:
            slot: slot of the parameter.
            tensor: the gradient.
            copies: the :class:`~deepreduce_hvd.torch.cuda.copies.CopiesToHost` of its bucket. The
                member may be encoded once they are done.
            held: as for :class:`~deepreduce_hvd.communicators.bucket.BucketMember`.
        """
        plain = tensor.detach() if tensor.requires_grad else tensor
        return HostMember(slot, self._on_host(plain, copies).contiguous().view(-1), held)

    def _on_host(self, tensor, copies):
        """Return the tensor on the host; its content is valid once ``copies`` are done."""
        if tensor.device.type == "cpu":
            return tensor
        if not self._warned:
            self._warned = True
            warn(
                f"gradients on {tensor.device} are compressed on the host, through"
                f" pinned memory: {self._device_path.why_not or 'there are no operators for it'}"
            )
        if tensor.device.type == "cuda":
            return self._device_path.side_streams.to_host(tensor, copies)
        return tensor.cpu()

    def decode(self, result, total, number, scale):
        """Fill ``result`` with the sum of one gradient.

        ``result`` may be the gradient's own memory, because the gradient is encoded already.

        Args:
            result: a tensor on the host or on a GPU.
            total: sum of the gradient's bucket.
            number: number of the gradient's bucket member.
            scale: factor of the sum.

        Returns:
            The sum as (d,) float32 on the host, and a bound of the magnitudes in it, which may be
            NaN.
        """
        # reuse the result's memory where possible: allocating new pages takes longer than the sum
        flat = as_float32(result) if result.device.type == "cpu" else None
        summed = (
            torch.zeros(
                result.numel(), dtype=torch.float32, device="cpu", pin_memory=result.is_cuda
            )
            if flat is None
            else flat.zero_()
        )
        largest = total.add_to(number, summed.numpy(), scale)
        if result.is_cuda:
            self._device_path.from_host(summed, result)
        elif flat is None:
            result.copy_(summed.view(result.shape))
        return summed, largest
