"""One bucket of DDP in one step: its gradients are encoded, exchanged and decoded."""

import dataclasses
import threading
import time
import zlib

import torch

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember, label_of
from deepreduce_hvd.communicators.encoding_threads import Encodings
from deepreduce_hvd.communicators.exchange import Channel, Exchange
from deepreduce_hvd.coordination.collective_names import collective_name
from deepreduce_hvd.errors import DeepReduceError
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.schedule.dag import EXCHANGES, FP16
from deepreduce_hvd.torch import results
from deepreduce_hvd.torch.ddp.old_gradients import OldGradients
from deepreduce_hvd.torch.ddp.one_rank import with_whole_memory


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """How compressed gradients are sent. Those of a bucket that have the same way share a message.

    An adapter has one object for each way: comparing policies takes longer.

    Attributes:
        policy: their :class:`~deepreduce_hvd.planning.policies.Policy`.
        communicator: their communicator.
    """

    policy: Policy
    communicator: Communicator


class BucketJob:
    """The work for one bucket.

    Threads encode large gradients, if the communicator allows it. The thread of the backward pass
    encodes all others when the job is created. :meth:`run` exchanges and decodes them in the thread
    of the driver.

    Args:
        adapter: the :class:`~deepreduce_hvd.torch.ddp.base.DistributedAdapter`.
        backward_pass: the :class:`~deepreduce_hvd.adapters.backward_pass.BackwardPass` of the
            bucket.
        buffer: all gradients of the bucket, (n,), which the averages replace.
        divisor: number by which the sums are divided; None for the number of ranks.

    Attributes:
        failure: an error before the exchange, which :meth:`run` raises in its place.
        error: why there is no result, once ``ended`` is set; None if there is one.
        ended: event that is set at the end.
        mirror: the :class:`~deepreduce_hvd.torch.ddp.mirrors.Mirror` of a bucket on a GPU, or None.
        future: what DDP waits for; its result is the average.
    """

    def __init__(self, adapter, backward_pass, buffer, divisor=None):
        self._adapter = adapter
        self._pass = backward_pass
        self._buffer = buffer
        self._divisor = adapter.transport.size if divisor is None else divisor
        self._compressed = {}  # Way -> [(slot, view of the gradient, its bucket member)]
        # "dense" or "fp16" -> [(slot, view of the gradient, what is sent for it)]
        self._uncompressed = {}
        self._unsent = []  # (slot, view of the gradient), in a job of one rank
        self._exchanges = []  # one for each policy and communicator
        self._channels = {}  # "dense" or "fp16" -> Channel
        self._old = None  # the OldGradients of a bucket that may have unused parameters
        self._postponed: tuple = ()  # arguments of encode, if that waits for the other ranks
        self.failure = None
        self.error = None
        self.ended = threading.Event()
        self.mirror = None
        devices = [] if buffer.device.type == "cpu" else [buffer.device]
        self._finished: torch.futures.Future = torch.futures.Future(devices=devices)
        # DDP would treat an exception that is set as the result as a tensor; an exception that a
        # callback raises reaches DDP as an error
        self.future = self._finished.then(self._outcome)

    def use(self, mirror):
        """Encode, exchange and decode in the mirror of the bucket."""
        self.mirror, self._buffer = mirror, mirror.host

    def encode(self, slots, gradients):
        """Encode the gradients and describe the first collective.

        If backward did not make some of them, :meth:`run` does this, once it knows whether another
        rank made them.

        Args:
            slots: slots of the parameters.
            gradients: views of the buffer, or of its mirror.
        """
        if self._adapter.may_leave_unused and self._old is None:
            self._old = OldGradients(self._adapter, slots, gradients)
            if self._old.found:
                self._postponed = slots, gradients
                return
        left_out = () if self._old is None else self._old.left_out
        for number, (slot, gradient) in enumerate(zip(slots, gradients)):
            made = self._begin(slot)
            if number not in left_out:
                self._add(slot, gradient, made)
        self._start()
        for _, _, member in (one for part in self._compressed.values() for one in part):
            if member.failure is not None:
                raise failure_of(member, member.failure) from member.failure

    def _begin(self, slot):
        """Begin the step of a slot; return whether this rank's backward pass made its gradient."""
        self._pass.slots.append(slot)
        slot.settle()
        slot.steps += 1
        made, slot.made = slot.made, False
        accumulation = self._adapter.accumulation
        if accumulation is not None:
            slot.refused = made and accumulation.refuses(slot)
            accumulation.exchanged(slot)
        return made

    def _add(self, slot, gradient, made):
        if self._adapter.alone:
            total = with_whole_memory(slot, gradient, made, self._pass.loss_scale)
            if total is not gradient:
                gradient.copy_(total)
            self._unsent.append((slot, gradient))
            return
        if slot.dense:
            way = slot.policy.way
            sent = slot.with_memory(
                gradient, made, self._pass.loss_scale, self._adapter.transport.size,
                self._dtype_of(way), divides=False,
            )  # fmt: skip
            if sent is not gradient and sent.dtype == gradient.dtype:
                sent = gradient.copy_(sent)  # the whole bucket may then be summed in place
            self._uncompressed.setdefault(way, []).append((slot, gradient, sent))
            return
        # zeros that backward did not make: the parameter was not used in this step, or this rank
        # has no more batches
        held = not made and not bool(gradient.any())
        member = self._member(slot, gradient, made, held)
        way = self._adapter.ways[slot.name]
        self._compressed.setdefault(way, []).append((slot, gradient, member))

    def _member(self, slot, gradient, made, held):
        """Return the bucket member of a gradient, or one that failed."""
        slot.payload = None
        try:
            encoded = slot.before_encoding(gradient, made, self._pass.loss_scale)
            return self._new_member(slot, encoded, held)
        # catch all errors: the other ranks must get a notice instead of waiting
        except Exception as error:
            return BucketMember.failed(slot.name, gradient.numel(), error)

    def _new_member(self, slot, gradient, held):
        return self._adapter.host_path.member(slot, gradient, None, held)

    def _start(self):
        """Create the exchanges, which encode, and the channels of the uncompressed sums.

        The names of the collectives tell which gradients of which step they are for.
        """
        compressor, transport = self._adapter.compressor, self._adapter.transport
        parts = [*self._compressed.values(), *self._uncompressed.values()]
        if not parts:
            return
        entries = [[(slot.name, slot.policy.way) for slot, *_ in part] for part in parts]
        content = repr((entries, str(self._buffer.dtype), parts[0][0][0].steps))
        mark = zlib.crc32(content.encode(), self._adapter.layout.fingerprint)
        scale = self._pass.loss_scale
        scaled = "" if scale is None else f".loss scale {scale!r}"

        def name_of(part):
            first = part[0][0]
            name = collective_name(compressor.number, first.name)
            return f"{name}.step {first.steps}.{mark:08x}{scaled}"

        for way, part in self._compressed.items():
            bucket = Bucket(
                way.policy.codec, way.policy.memory, [member for _, _, member in part],
                compressor.seed, part[0][0].steps - 1, transport.rank,
            )  # fmt: skip
            self._exchanges.append(self._exchange(way, part, bucket, name_of(part)))
        for way, part in self._uncompressed.items():
            self._channels[way] = Channel(transport, f"{name_of(part)}.{way}")

    def _exchange(self, way, part, bucket, name):
        """Return the exchange of the gradients of one way."""
        before = self._encoded(way, part)
        return Exchange(way.communicator, bucket, self._adapter.transport, name, before)

    def _encoded(self, way, part):
        """Let threads encode gradients; yield the handle that must be done before the exchange."""
        adapter, policy = self._adapter, way.policy
        # the threads take gradients from one thread only, which is not that of run
        if not way.communicator.sends_payloads or self._postponed:
            return
        encodings = {}
        for slot, _, member in part:
            slot.encoding = adapter.threads.start(
                member, policy.codec, policy.memory, adapter.compressor.seed, slot.steps - 1,
                adapter.transport.rank,
            )  # fmt: skip
            if slot.encoding is not None:
                encodings[member] = slot.encoding
        if encodings:
            yield Encodings(list(encodings.values()))
        for member, encoding in encodings.items():
            try:
                encoding.payload()
            except Exception as error:
                raise failure_of(member, error) from error

    def run(self):
        """Exchange and decode; called by the driver."""
        if self.failure is not None:
            raise self.failure
        if self._old is not None:
            self._old.clear()
            if self._postponed:
                self._encode_postponed()
        transport = self._adapter.transport
        for part, exchange in zip(self._compressed.values(), self._exchanges):
            started = time.perf_counter()
            if exchange.channel.in_groups:  # a failed rank tells all ranks, not its groups
                transport.wait(transport.meet(f"{exchange.name}.groups"))
            total = exchange.finish()
            self._adapter.times.message(exchange.bucket.label, started, time.perf_counter())
            self._decode(part, exchange, total)
        for way, part in self._uncompressed.items():
            self._sum_uncompressed(way, part)
        for slot, gradient in self._unsent:
            slot.count_unsent(gradient)
            if self._pass.loss_scale is not None:
                self._look_at(slot, gradient)

    def _encode_postponed(self):
        self.encode(*self._postponed)

    def end(self, error):
        """Hand the average, or an error, to DDP."""
        self.error = error
        self._compressed, self._uncompressed, self._exchanges = {}, {}, []
        self._unsent, self._postponed = [], ()
        try:
            if error is None:
                self._hand_over()
        except Exception as failed:  # CUDA's
            self.error = failed
        if not self._finished.done():
            self._finished.set_result(self._buffer if self.error is None else None)
        self._buffer = self.mirror = self._old = None
        self.ended.set()

    def _hand_over(self):
        """Complete the bucket; make it the result of the future, if it belongs to a stream."""
        if self._old is not None:
            self._old.put_back()
        if self.mirror is not None:
            self.mirror.finish(self._finished)

    def _outcome(self, finished):
        if self.error is not None:
            raise self.error
        return finished.value()

    def _decode(self, part, exchange, total):
        """Write the averages of compressed gradients into the bucket."""
        self._count(part, exchange, total)
        scale = 1.0 / self._divisor
        for number, (slot, gradient, _) in enumerate(part):
            started = time.perf_counter()
            summed, largest = self._adapter.host_path.decode(gradient, total, number, scale)
            if results.may_exceed(gradient.dtype, largest):
                self._look_at(slot, summed.to(gradient.dtype), warns=True)
            ended = time.perf_counter()
            slot.decode_seconds += ended - started
            self._adapter.times.result(slot.name, started, ended, EXCHANGES)

    def _count(self, part, exchange, total):
        """Note what the exchange of gradients has sent, and whether some of them are void."""
        channel = exchange.channel
        extra = (channel.rounds + channel.in_groups) * self._adapter.transport.head_bytes
        extra += self._bytes_besides_payloads(part, channel)
        if self._old is not None and exchange is self._exchanges[0]:
            extra += self._old.sent_bytes
        for number, (slot, gradient, _) in enumerate(part):
            slot.encode_seconds += exchange.encode_seconds(number)
            slot.encoding = None  # it refers to the payload
            slot.count_sent(gradient, exchange, 0 if number else extra)
            if total.non_finite(number):
                slot.void = True
                self._adapter.warn_of_non_finite(slot.name)

    def _bytes_besides_payloads(self, part, channel):
        return 0

    def _dtype_of(self, way):
        """Return the dtype of the message of a way: float16, or at least float32."""
        if way == FP16:
            return torch.float16
        return torch.promote_types(self._buffer.dtype, torch.float32)

    def _sum_uncompressed(self, way, part):
        """Average gradients that are not compressed, in one message."""
        times, started = self._adapter.times, time.perf_counter()
        summed = self._joined(way, part)
        average = self._average(way, summed)
        received = time.perf_counter()
        label = label_of([slot.name for slot, *_ in part])
        times.message(f"{label}, {way}", started, received)
        parts = average.split([gradient.numel() for _, gradient, _ in part])
        gradients = [gradient for _, gradient, _ in part]
        if average is not self._buffer:
            torch._foreach_copy_(
                gradients, [own.view(one.shape) for own, one in zip(parts, gradients)]
            )
        for slot, gradient, _ in part:
            slot.count_dense(gradient, summed[: gradient.numel()])
            may_overflow = way == FP16 or slot.changes
            if may_overflow or self._pass.loss_scale is not None:
                self._look_at(slot, gradient, may_overflow)
        times.result(label, received, time.perf_counter(), EXCHANGES)

    def _joined(self, way, part):
        """Return what is sent as one tensor, which is the whole buffer if possible."""
        dtype = self._dtype_of(way)
        size = sum(gradient.numel() for _, gradient, _ in part)
        if dtype == self._buffer.dtype and size == self._buffer.numel():
            return self._buffer
        return torch.cat([sent.reshape(-1).to(dtype) for _, _, sent in part])

    def _average(self, way, summed):
        """Sum a tensor over all ranks in place.

        Returns:
            The average, in the same memory unless it is float16: small float16 sums would become
            zero.
        """
        self._adapter.transport.wait(self._channels[way].allreduce_in_place(summed))
        return summed.to(torch.promote_types(summed.dtype, torch.float32)).div_(self._divisor)

    def _look_at(self, slot, result, warns=False):
        """Record whether an optimizer gets NaN or Inf; loss scaling then skips its step."""
        if not results.is_finite(result):
            slot.void = True
            if warns:
                self._adapter.warn_of_non_finite(slot.name)


def failure_of(member, error):
    """Return the error of a rank that cannot encode a gradient.

    The driver sends it to the other ranks instead of the exchange. So they learn the number of this
    rank in the job, and not its place among the ranks of the exchange.
    """
    return DeepReduceError(f"parameter {member.name}: {wire.describe(error)}")
