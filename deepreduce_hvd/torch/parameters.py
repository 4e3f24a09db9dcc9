"""Map gradients to named parameters, and record which gradients backward makes."""

import weakref
import zlib

import torch

from deepreduce_hvd.coordination.compared_settings import Setting, warns_first_rank
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.torch.ops import DTYPES
from deepreduce_hvd.torch.slot import Slot
from deepreduce_hvd.validation import expect_size

_OTHER_VALUES = (
    "{ranks} began with other values of the compressor's parameters than the first rank; call"
    " hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, and after"
    " hvd.broadcast_optimizer_state, which may change them; ignore this if the program changes the"
    " parameters on purpose, for its backward pass only"
)


def make_slots(compressor, named, home):
    """Make the slot of each parameter.

    Args:
        compressor: the :class:`Compressor`.
        named: (name, parameter) pairs.
        home: function of a parameter that returns the device for its memory.

    Returns:
        {name: Slot}.

    Raises:
        InvalidArgumentError: not a tensor, of a dtype whose gradients cannot be sent, or too large
            for a payload.
    """
    keep_backup = compressor.loss_scale is not None
    slots = {}
    for name, parameter in named:
        if not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(
                f"Compressor parameter {name}: expected a torch parameter, "
                f"got {type(parameter).__name__}"
            )
        _expect_dtype(name, parameter)
        expect_size(name, parameter.numel(), "tensor")
        key = zlib.crc32(name.encode())
        slots[name] = Slot(
            name, parameter, key, compressor.policies[name], keep_backup, home(parameter)
        )
    return slots


def _expect_dtype(name, parameter):
    """Raise InvalidArgumentError for a trained parameter whose gradients cannot be sent.

    Others, such as integers, are never exchanged.
    """
    if parameter.requires_grad and parameter.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"Compressor parameter {name}: expected gradients of {', '.join(map(str, DTYPES))}, "
            f"got {parameter.dtype}"
            f"{'; train its torch.view_as_real' if parameter.is_complex() else ''}"
        )


class Parameters:
    """The slots by parameter, and the hooks that record which gradients backward makes.

    Attributes:
        gradients_made: number of gradients that backward has made so far, of all parameters.
        discards: the :class:`~deepreduce_hvd.torch.discards.Discards` that learns of them, or None.
        unexchanged: {id of a parameter: slot} of the gradients that were made and not exchanged
            since then; None if nobody asks for them.
    """

    def __init__(self, slots):
        self._by_id = {id(slot.parameter): slot for slot in slots.values()}
        # id of a gradient -> the slot of its parameter; out of date after a backward pass that
        # makes other gradients
        self._by_gradient = {}
        self.gradients_made = 0
        self.discards = None
        self.unexchanged = None
        self._register_hooks()

    def __iter__(self):
        return iter(self._by_id.values())

    def get(self, parameter):
        """Return the slot of a parameter, or None."""
        return self._by_id.get(id(parameter))

    def _register_hooks(self):
        """Register hooks that record which gradients backward makes.

        Horovod's own hooks run right after these. Frozen parameters get a hook too, because they
        may be trained later, complex ones too. PyTorch registers hooks only while a parameter is
        trained, and keeps them.
        """
        # a parameter may outlive its compressor and must not keep the residuals alive
        own = weakref.ref(self)

        @torch._disable_dynamo  # which would trace it in a training step that is compiled
        def note(parameter):
            parameters = own()
            if parameters is not None:
                slot = parameters.get(parameter)
                slot.made = True
                parameters.gradients_made += 1
                if parameters.discards is not None:
                    parameters.discards.made(slot)
                if parameters.unexchanged is not None:
                    parameters.unexchanged[id(parameter)] = slot

        handles = []
        for slot in self:
            parameter, trained = slot.parameter, slot.parameter.requires_grad
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if not parameter.is_leaf or parameter.is_inference() or not can_be_trained:
                continue
            parameter.requires_grad_(True)
            try:
                handles.append(parameter.register_post_accumulate_grad_hook(note))
            finally:
                parameter.requires_grad_(trained)
        weakref.finalize(self, _remove, handles).atexit = False  # type: ignore[misc]

    def slot_for(self, tensor, parameter):
        """Return the slot that a gradient belongs to.

        Args:
            tensor: the gradient.
            parameter: its parameter; None if unknown.

        Raises:
            InvalidArgumentError: the gradient belongs to no slot, or cannot be compressed.
        """
        slot = self._owner_of(tensor) if parameter is None else self.get(parameter)
        if slot is None or slot.parameter.shape != tensor.shape:
            raise InvalidArgumentError(
                f"compress: expected the gradient of one of the {len(self._by_id)} named"
                f" parameters, got another tensor of shape {tuple(tensor.shape)}; give Compressor"
                " the same named_parameters as DistributedOptimizer, or give hvd.allreduce a"
                " parameter's .grad itself"
            )
        if slot.parameter is tensor:
            raise InvalidArgumentError(
                "compress: expected a gradient, got a parameter, which op=Adasum passes; "
                "use op=Average or op=Sum with this compressor"
            )
        if tensor.layout == torch.sparse_coo:
            raise InvalidArgumentError(
                f"parameter {slot.name}: expected a dense gradient, got a sparse one; "
                "use sparse_as_dense=True and no groups="
            )
        return slot

    def _owner_of(self, gradient):
        """Return the slot whose parameter has this gradient, or None.

        All parameters are looked through only when the gradients are others than in the last
        search, so mostly once per step.
        """
        slot = self._by_gradient.get(id(gradient))
        if slot is None or slot.parameter.grad is not gradient:
            self._by_gradient = {id(slot.parameter.grad): slot for slot in self}
            slot = self._by_gradient.get(id(gradient))
        return slot


def frozen_parameters(slots):
    """Return the setting with the parameters that are frozen; their buckets depend on it.

    Args:
        slots: name of a parameter -> its slot.
    """
    return Setting(
        "frozen parameters",
        [
            f"{name} {'frozen' if slot.frozen else 'trained'}"
            for name, slot in slots.items()
            if not slot.dense
        ],
    )


def values_of(parameters, transport, warning=_OTHER_VALUES):
    """Return the setting with a checksum of each parameter. Ranks should begin with equal ones.

    Args:
        parameters: name of a parameter -> the parameter, or this rank's part of it.
        transport, warning: as for
            :func:`~deepreduce_hvd.coordination.compared_settings.warns_first_rank`.
    """
    sums = [f"{name} {_sum_of_bits(one.detach())}" for name, one in parameters.items()]
    return Setting("values of parameters", sums, warns_first_rank(warning, transport))


def _sum_of_bits(values):
    """Return the sum of a tensor's memory as integers, which takes about as long as reading it."""
    plain = type(values) is torch.Tensor and values.layout == torch.strided
    if not plain or values.dtype not in DTYPES or values.is_meta:
        return 0  # its values are elsewhere, or it is never exchanged
    flat = values.contiguous().view(-1)
    in_word = 8 // flat.element_size()
    if flat.storage_offset() % in_word:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % in_word
    rest = bytes(flat[whole:].view(torch.uint8).tolist())
    return int(flat[:whole].view(torch.int64).sum()) + int.from_bytes(rest, "little")


def _remove(handles):
    """Remove hooks of parameters, which may have another compressor now."""
    for handle in handles:
        handle.remove()
