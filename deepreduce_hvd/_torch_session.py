"""The compressor's work on PyTorch: which parameter a gradient belongs to, its state, and the way there and back."""

import time
import warnings
import weakref
import zlib

import horovod.torch as hvd
import torch

from deepreduce_hvd import payload as container, state as saved_state, wire
from deepreduce_hvd._torch_state import Slot
from deepreduce_hvd._torch_transport import HorovodTransport
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.statistics import totals
from deepreduce_hvd.torch import checked, decode_sum_flat, encode_flat


class _Pending:
    """One gradient between compress and decompress."""

    def __init__(self, slot, gradient, handle):
        self.slot = slot
        self.gradient = gradient
        self.handle = handle


class Session:
    """The PyTorch side of one Compressor."""

    def __init__(self, compressor, named):
        self.compressor = compressor
        self.transport = HorovodTransport(compressor.process_set)
        memory = compressor.memory
        keep_backup = compressor.loss_scale is not None
        self.slots = {}
        for name, parameter in named:
            if not isinstance(parameter, torch.Tensor):
                raise InvalidArgument(f"Compressor parameter {name}: expected a torch parameter, got {type(parameter).__name__}")
            if parameter.numel() > container.MAX_ELEMENTS:
                raise InvalidArgument(
                    f"Compressor parameter {name}: expected at most {container.MAX_ELEMENTS} elements, got {parameter.numel()}; split the tensor"
                )
            self.slots[name] = Slot(name, parameter, zlib.crc32(name.encode()), memory, compressor.dense_below, keep_backup)
        self._slot_of = {id(slot.parameter): slot for slot in self.slots.values()}
        self._last_ready = None
        self._register_hooks()
        # a round is one step's compress calls followed by its decompress calls
        self._round = []
        self._round_decompressing = False
        self._round_void = False
        self._rounds = 0
        self._warned = set()

    # --- which parameter ---

    def _register_hooks(self):
        """Remembers the parameter whose gradient has just become ready: Horovod's own hook runs right after."""
        session = weakref.ref(self)  # a parameter outlives its compressor, whose residuals it must not keep

        def remember_ready(parameter):
            if session() is not None:
                session()._last_ready = session()._slot_of[id(parameter)]

        for slot in self.slots.values():
            if slot.parameter.requires_grad and slot.parameter.is_leaf:
                slot.parameter.register_post_accumulate_grad_hook(remember_ready)

    def _slot_for(self, tensor):
        last, self._last_ready = self._last_ready, None
        if last is not None and last.parameter.grad is tensor:
            return last
        for slot in self.slots.values():
            if slot.parameter.grad is tensor:
                return slot
        # sparse_as_dense: Horovod hands over a densified copy
        alike = [slot for slot in self.slots.values() if _is_sparse(slot.parameter.grad) and slot.parameter.shape == tensor.shape]
        if len(alike) > 1:
            if last in alike and torch.equal(last.parameter.grad.to_dense(), tensor):
                return last
            alike = [slot for slot in alike if torch.equal(slot.parameter.grad.to_dense(), tensor)]
        if len(alike) == 1:
            return alike[0]
        if any(slot.parameter is tensor for slot in self.slots.values()):
            raise InvalidArgument(
                "compress: expected a gradient, got a parameter, as op=Adasum hands over; use op=Average or op=Sum with this compressor"
            )
        raise InvalidArgument(
            f"compress: expected the gradient of one of the {len(self.slots)} named parameters, got another tensor of shape "
            f"{tuple(tensor.shape)}; give Compressor the same named_parameters as DistributedOptimizer"
            + (f" (it could be any of {', '.join(slot.name for slot in alike)})" if alike else "")
        )

    # --- there ---

    def compress(self, tensor):
        slot = self._slot_for(tensor)
        if self._round_decompressing:
            self._close_round()
        self._round.append(slot)
        if tensor.layout == torch.sparse_coo:
            raise InvalidArgument(
                f"parameter {slot.name}: expected a dense gradient, got a sparse one; use sparse_as_dense=True and no groups="
            )
        slot.steps += 1
        if slot.dense:
            # Horovod's allreduce has no bfloat16 on the host
            reduced = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            slot.count_dense(tensor, reduced)
            return reduced, _Pending(slot, tensor, None)
        started = time.perf_counter()
        try:
            message = self._encode(slot, tensor)
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            message = torch.from_numpy(wire.notice(error))
            slot.failure = error
        slot.encode_seconds += time.perf_counter() - started
        slot.count_payload(message, tensor)
        handle = self.compressor.communicator.start(self.transport, message, f"deepreduce.{slot.name}")
        probe = torch.tensor(wire.probe(hvd.rank(), self.compressor.fingerprint), dtype=torch.float32)
        return probe, _Pending(slot, tensor, handle)

    def _encode(self, slot, tensor):
        self._follow_loss_scale(slot)
        slot.back_up()
        compressor = self.compressor
        gradient = self._on_host(tensor.detach()).contiguous().view(-1)
        return encode_flat(
            compressor.codec, compressor.memory, gradient, slot.state, slot.threshold,
            compressor.seed, slot.steps - 1, slot.key, hvd.rank(),
        )  # fmt: skip

    def _on_host(self, tensor):
        if tensor.device.type == "cpu":
            return tensor
        self._warn_once("device", f"gradients on {tensor.device} are compressed on the host, through pinned memory; there are no device kernels yet")
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        host.copy_(tensor)
        return host

    def _follow_loss_scale(self, slot):
        """Residuals are in units of the scaled loss: when the scale changes they change with it (exactly, powers of two)."""
        if self.compressor.loss_scale is None:
            return
        scale = float(self.compressor.loss_scale())
        if slot.loss_scale is not None and scale != slot.loss_scale:
            for part in slot.state:
                part.mul_(scale / slot.loss_scale)
        slot.loss_scale = scale

    # --- and back ---

    def decompress(self, tensor, pending):
        self._round_decompressing = True
        slot = pending.slot
        if pending.handle is None:
            if self.compressor.loss_scale is not None and not bool(torch.isfinite(tensor).all()):
                self._round_void = True
            return tensor.to(pending.gradient.dtype)
        gathered = self.compressor.communicator.finish(self.transport, pending.handle)
        messages = wire.split(gathered.numpy())
        try:
            wire.raise_notices(slot.name, messages)
        except Exception as error:
            raise error from slot.failure
        scale = wire.scale_of(slot.name, tensor.tolist(), self.transport.ranks, self.compressor.fingerprint)
        started = time.perf_counter()
        payloads = [gathered[message.start : message.end] for message in messages]
        if any(message.non_finite for message in messages):
            self._meet_non_finite(slot)
        result = self._decode(slot, pending.gradient, payloads, scale)
        slot.decode_seconds += time.perf_counter() - started
        return result

    def _decode(self, slot, gradient, payloads, scale):
        if _is_sparse(slot.parameter.grad) and not self._round_void:
            return self._decode_sparse(slot.parameter.grad, gradient, payloads, scale)
        in_place = gradient.device.type == "cpu" and gradient.dtype == torch.float32 and gradient.is_contiguous()
        if in_place:  # the gradient's own memory: it is encoded already, and fresh pages would cost more than the sum
            out = gradient.detach().view(-1).zero_()
        else:
            out = torch.zeros(gradient.numel(), dtype=torch.float32)
        decode_sum_flat(payloads, out, scale)
        return out.view(gradient.shape).to(device=gradient.device, dtype=gradient.dtype)

    def _decode_sparse(self, like, gradient, payloads, scale):
        """The sum in the layout of the parameter's own sparse gradient: whole slices of its dense dimensions."""
        flat, values = checked(torch.ops.deepreduce.decode_sparse, payloads, gradient.numel(), scale)
        sparse_shape = like.shape[: like.sparse_dim()]
        slice_size = int(torch.Size(like.shape[like.sparse_dim() :]).numel())
        rows, of_row = torch.unique(flat // slice_size, return_inverse=True)
        slices = torch.zeros(rows.numel() * slice_size)
        slices[of_row * slice_size + flat % slice_size] = values
        indices = torch.stack(torch.unravel_index(rows, sparse_shape))
        slices = slices.view(-1, *like.shape[like.sparse_dim() :]).to(like.dtype)
        return torch.sparse_coo_tensor(indices, slices, like.shape, is_coalesced=True).to(like.device)

    def _meet_non_finite(self, slot):
        self._round_void = True
        if self.compressor.loss_scale is None:
            self._warn_once(
                "non-finite",
                f"parameter {slot.name}: a rank's gradient had NaN or Inf and every rank gets NaN; if such steps are to be skipped, as loss "
                "scaling does, give Compressor loss_scale=scaler.get_scale so that no residual loses what the skipped step had sent",
            )

    # --- rounds ---

    def _close_round(self):
        """Before anything reads or changes state after a round: undoes a void one, writes scalars."""
        if not self._round_decompressing:
            return
        if self._round_void:
            for slot in self._round:
                slot.restore()
        self._rounds += 1
        writer = self.compressor.writer
        if writer is not None and self._rounds % self.compressor.writer_interval == 0:
            stats = self.stats()
            for field, value in totals(stats).items():
                writer.add_scalar(f"deepreduce/{field}", value, self._rounds)
            errors = [row["relative_error"] for row in stats.values() if row["relative_error"] is not None]
            if errors:
                writer.add_scalar("deepreduce/relative_error", sum(errors) / len(errors), self._rounds)
        self._round = []
        self._round_decompressing = False
        self._round_void = False

    def stats(self):
        return {name: slot.statistics(self.compressor.memory) for name, slot in self.slots.items()}

    def state_dict(self):
        self._close_round()
        return saved_state.dump(self.slots, self.compressor.fingerprint, self.transport.rank, self.transport.size)

    def load_state_dict(self, state):
        self._close_round()
        saved_state.load(self.slots, state, self.compressor.fingerprint, self.transport.rank, self.transport.size)

    def _warn_once(self, topic, message):
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"deepreduce_hvd: {message}", stacklevel=3)


def _is_sparse(gradient):
    return gradient is not None and gradient.layout == torch.sparse_coo
