"""The compressor's work on PyTorch: which parameter a gradient belongs to, its state, and the way there and back."""

import time
import warnings
import weakref
import zlib

import horovod.torch as hvd
import numpy as np
import torch

from deepreduce_hvd import _torch_elastic, buckets, payload as container, state as saved_state, wire
from deepreduce_hvd._torch_copies import CopiesToHost
from deepreduce_hvd._torch_device import DevicePath
from deepreduce_hvd._torch_state import Slot
from deepreduce_hvd._torch_transport import HorovodTransport
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.communicators.job import Job, Member
from deepreduce_hvd.errors import InvalidArgument
from deepreduce_hvd.statistics import totals
from deepreduce_hvd.torch import encode_flat

_GRACE_SECONDS = 1.0
#: PyTorch's types of gradients -> their codes in docs/format.md
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


class _Flight:
    """One bucket in one round: filled by compress, exchanged, emptied by decompress."""

    def __init__(self, slots):
        self.slots = slots  # of the whole bucket, in the order of their parts in its messages
        self.members = {}  # slot -> Member
        self.copies = CopiesToHost()  # of gradients that are encoded there
        self.order = []  # slots of the members once the exchange has started
        self.exchange = None

    @property
    def full(self):
        return len(self.members) == len(self.slots)


class _Pending:
    """One gradient between compress and decompress; no flight when it goes dense."""

    def __init__(self, slot, gradient, flight=None):
        self.slot = slot
        self.gradient = gradient
        self.flight = flight


class Session:
    """The PyTorch side of one Compressor."""

    def __init__(self, compressor, named):
        _torch_elastic.register()
        self.compressor = compressor
        self.transport = HorovodTransport(compressor.process_set)
        self.device_path = DevicePath(compressor)
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
            home = self.device_path.home(parameter)
            self.slots[name] = Slot(name, parameter, zlib.crc32(name.encode()), memory, compressor.dense_below, keep_backup, home)
        self._slot_of = {id(slot.parameter): slot for slot in self.slots.values()}
        self._bucket_of = self._make_buckets()
        self._last_ready = None
        #: the handler of hvd.elastic.TorchState that this compressor was given to
        self.elastic = None
        self._register_hooks()
        # a round is one step's compress calls followed by its decompress calls
        self._rounds = 0
        self._forget_round()
        self._warned = set()

    def _make_buckets(self):
        """{slot: (number of its bucket, all slots of it)}; backward makes gradients ready from the last parameter to the first."""
        compressed = [slot for slot in reversed(self.slots.values()) if not slot.dense]
        bucket_of = {}
        for number, positions in enumerate(buckets.assign([slot.parameter.numel() for slot in compressed], self.compressor.bucket_bytes)):
            slots = [compressed[position] for position in positions]
            bucket_of.update((slot, (number, slots)) for slot in slots)
        return bucket_of

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
            self.close_round()
        if not self._round:
            if self.elastic is not None:
                self.elastic.follow()
            self._probe = torch.tensor(wire.probe(hvd.rank(), self.compressor.fingerprint), dtype=torch.float32)
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
            return reduced, _Pending(slot, tensor)
        number, slots = self._bucket_of[slot]
        flight = self._flights.get(number)
        if flight is None or slot in flight.members:
            flight = self._flights[number] = _Flight(slots)
        flight.members[slot] = self._member(slot, tensor, flight.copies)
        if flight.full:
            self._start(flight)
        self._advance()
        return self._probe.clone(), _Pending(slot, tensor, flight)

    def _advance(self):
        for exchange in self._moving:
            exchange.advance()
        self._moving = [exchange for exchange in self._moving if not exchange.done]

    def _member(self, slot, tensor, copies):
        try:
            on_device = self.device_path.takes(tensor)
            slot.move_to(tensor.device if on_device else torch.device("cpu"))
            self._follow_loss_scale(slot)
            slot.back_up()
            if on_device:
                return self.device_path.member(slot, tensor, hvd.rank())
            gradient = self._on_host(tensor.detach(), copies).contiguous().view(-1)
            # NumPy has no bfloat16: the numbers go as they lie in memory
            dtype = _DTYPES.get(gradient.dtype)
            if dtype is None:
                raise InvalidArgument(f"gradient: expected {', '.join(map(str, _DTYPES))}, got {gradient.dtype}")
            state = tuple(part.numpy() for part in slot.state)
            array = (gradient.view(torch.int16) if gradient.dtype == torch.bfloat16 else gradient).numpy()
            return Member(slot.name, array, state, slot.key, dtype, slot.threshold.numpy(), lambda: self._encode(slot, gradient))
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            return Member.failed(slot.name, tensor.numel(), error)

    def _encode(self, slot, gradient):
        compressor = self.compressor
        payload = encode_flat(
            compressor.codec, compressor.memory, gradient, slot.state, slot.threshold,
            compressor.seed, slot.steps - 1, slot.key, hvd.rank(),
        )  # fmt: skip
        slot.payload = payload
        return payload.numpy()

    def _start(self, flight):
        """Starts the exchange of what a flight holds: of the whole bucket, unless some gradients did not come."""
        flight.order = [slot for slot in flight.slots if slot in flight.members]
        for slot in flight.order:
            slot.payload = None
        compressor, first = self.compressor, flight.order[0]
        members = [flight.members[slot] for slot in flight.order]
        job = Job(compressor.codec, compressor.memory, members, compressor.seed, first.steps - 1, hvd.rank())
        compressor.communicator.prepare(self.transport)
        communicator, name = self.device_path.communicator(flight.order), f"deepreduce.{first.name}"
        flight.exchange = Exchange(communicator, job, self.transport, name, after=flight.copies or None)
        self._moving.append(flight.exchange)

    def _on_host(self, tensor, copies):
        """The tensor's numbers, there when ``copies`` have come."""
        if tensor.device.type == "cpu":
            return tensor
        self._warn_once("device", f"gradients on {tensor.device} are compressed on the host, through pinned memory: {self.device_path.why_not or 'there are no operators for it'}")
        return self.device_path.side_streams.to_host(tensor, copies) if tensor.device.type == "cuda" else tensor.cpu()

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
        slot, flight = pending.slot, pending.flight
        if flight is None:
            if self.compressor.loss_scale is not None and not bool(torch.isfinite(tensor).all()):
                self._round_void = True
            return tensor.to(pending.gradient.dtype)
        # first of all, since ranks that are configured differently may wait for each other in an exchange for ever
        try:
            scale = wire.scale_of(slot.name, tensor.tolist(), self.transport.ranks, self.compressor.fingerprint)
        except InvalidArgument:
            time.sleep(_GRACE_SECONDS)  # this rank's end shuts Horovod down: the others come to the same check, and message, before
            raise
        if flight.exchange is None:  # the round's gradients have all come; some of its bucket's parameters had none
            for other in self._flights.values():
                if other.exchange is None:
                    self._start(other)
        exchange = flight.exchange
        for moving in list(self._moving):  # all of them now, asleep: between two results Horovod's own wait would spin
            moving.wait(self._moving)
        total = exchange.finish()
        started = time.perf_counter()
        number = flight.order.index(slot)
        slot.encode_seconds += exchange.seconds * slot.parameter.numel() / max(exchange.job.d, 1)
        slot.count_sent(pending.gradient, exchange)
        if total.non_finite(number):
            self._meet_non_finite(slot)
        result = self._decode(slot, pending.gradient, total, number, scale)
        slot.decode_seconds += time.perf_counter() - started
        return result

    def _decode(self, slot, gradient, total, number, scale):
        if _is_sparse(slot.parameter.grad) and not self._round_void:
            return self._decode_sparse(slot.parameter.grad, gradient, *total.sparse(number, scale))
        if self.device_path.takes(gradient):
            return self.device_path.decode(slot.name, gradient, total, number, scale)
        in_place = gradient.device.type == "cpu" and gradient.dtype == torch.float32 and gradient.is_contiguous()
        if in_place:  # the gradient's own memory: it is encoded already, and fresh pages would cost more than the sum
            out = gradient.detach().view(-1).zero_()
        else:
            out = torch.zeros(gradient.numel(), dtype=torch.float32, pin_memory=gradient.is_cuda)
        total.add_to(number, out.numpy(), scale)
        if gradient.is_cuda:
            return self.device_path.from_host(out, gradient)
        return out.view(gradient.shape).to(device=gradient.device, dtype=gradient.dtype)

    def _decode_sparse(self, like, gradient, indices, values):
        """The sum in the layout of the parameter's own sparse gradient: whole slices of its dense dimensions."""
        flat, values = torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(np.array(values))
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

    def _forget_round(self):
        self._round = []
        self._flights = {}  # by the bucket's number
        self._moving = []  # their exchanges that are not done
        self._round_decompressing = False
        self._round_void = False

    def abandon(self):
        """Forgets a step that cannot be finished, and what was known of the other ranks: they may have changed."""
        self._forget_round()
        self.device_path.forget()
        self.transport.reset()
        self.compressor.communicator.reset()

    def close_round(self):
        """Before anything reads or changes state after a round: undoes a void one, writes scalars."""
        if not self._round_decompressing:
            return
        self.device_path.check()
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
        self._forget_round()

    def stats(self):
        return {name: slot.statistics(self.compressor.memory) for name, slot in self.slots.items()}

    def state_dict(self):
        self.close_round()
        return saved_state.dump(self.slots, self.compressor.fingerprint, self.transport.rank, self.transport.size)

    def load_state_dict(self, state):
        self.close_round()
        saved_state.load(self.slots, state, self.compressor.fingerprint, self.transport.rank, self.transport.size)

    def _warn_once(self, topic, message):
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"deepreduce_hvd: {message}", stacklevel=3)


def _is_sparse(gradient):
    return gradient is not None and gradient.layout == torch.sparse_coo
