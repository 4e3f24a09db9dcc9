"""A gradient that is encoded on the host, by PyTorch's operator."""

import torch

from deepreduce_hvd.communicators.bucket import BucketMember, payload_of_nothing
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.ops import DTYPES, encode_flat


class HostMember(BucketMember):
    """A bucket member whose gradient is a tensor on the host.

    Args:
        slot: slot of the parameter.
        gradient: (d,) contiguous tensor on the host.
        held: as of :class:`~deepreduce_hvd.communicators.bucket.BucketMember`.

    Raises:
        InvalidArgumentError: the gradient's dtype is not one of docs/format.md.
    """

    def __init__(self, slot, gradient, held):
        dtype = DTYPES.get(gradient.dtype)
        if dtype is None:
            raise InvalidArgumentError(
                f"gradient: expected {', '.join(map(str, DTYPES))}, got {gradient.dtype}"
            )
        # NumPy has no bfloat16: pass the bits as int16
        bits = gradient.view(torch.int16) if gradient.dtype == torch.bfloat16 else gradient
        state = tuple(part.numpy() for part in slot.state)
        super().__init__(
            slot.name, bits.numpy(), state, slot.key, dtype, slot.threshold.numpy(), held
        )
        self._slot = slot
        self._gradient = gradient

    def encode(self, bucket):
        """Return the payload, (n,) uint8 NumPy. The slot keeps it for the statistics."""
        slot, codec = self._slot, bucket.codec
        if self.held:
            slot.payload = torch.from_numpy(
                payload_of_nothing(codec, self._gradient.numel(), self.dtype)
            )
        else:
            slot.payload = encode_flat(
                codec, bucket.memory, self._gradient, slot.state, slot.threshold,
                bucket.seed, slot.steps - 1, slot.key, bucket.rank,
            )  # fmt: skip
        return slot.payload.numpy()
