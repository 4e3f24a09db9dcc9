"""Buckets on a GPU whose gradients are encoded and summed there, with the CUDA operators.

Each GPU has two streams beside that of backward. The hook notes when a bucket's gradients are
ready. A thread then encodes them on the first stream, while backward goes on. The driver waits for
the sizes of the payloads, exchanges these, and sums them on the second stream, so that the sums of
one bucket do not wait for the gradients of the next one. DDP's future belongs to the second stream,
and no thread waits for the sums.
"""

import itertools
import math
import time

import torch

from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.schedule.dag import EXCHANGES
from deepreduce_hvd.torch.cuda.copies import CopiesToHost
from deepreduce_hvd.torch.cuda.exchange import DeviceAllgather
from deepreduce_hvd.torch.ddp.buckets import BucketJob, Way, failure_of


class DeviceStreams:
    """The streams of one GPU for the gradients of one model.

    Args:
        device: the GPU.

    Attributes:
        encoding: stream of the encodings.
        exchange: stream of what follows: copies, collectives and sums.
    """

    def __init__(self, device):
        self.encoding, self.exchange = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device

    def now(self):
        """Return an event of the work that the current stream has so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self):
        """Let the current stream wait for both streams."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.encoding)
        current.wait_stream(self.exchange)


class DeviceBucketJob(BucketJob):
    """The work for one bucket on a GPU.

    Args:
        adapter, backward_pass, buffer: as for :class:`~deepreduce_hvd.torch.ddp.buckets.BucketJob`.
            The gradients are ready when the current stream of the buffer's GPU has done the work
            that it has when the job is created.
        streams: the :class:`DeviceStreams` of the GPU.
    """

    def __init__(self, adapter, backward_pass, buffer, streams):
        super().__init__(adapter, backward_pass, buffer)
        self._streams = streams
        self._ready = streams.now()
        self._path = adapter.device_path
        self._copies = CopiesToHost()
        self._copied = {}  # way -> (uncompressed gradients as one tensor, their copy on the host)

    def encode(self, slots, gradients):
        with torch.cuda.stream(self._streams.encoding):
            self._streams.encoding.wait_event(self._ready)
            super().encode(slots, gradients)

    def _new_member(self, slot, gradient, held):
        return self._path.member(slot, gradient, held)

    def _start(self):
        if not self._path.nccl:
            for way, part in self._uncompressed.items():
                joined = super()._joined(way, part)
                joined.record_stream(self._streams.exchange)
                host = self._copies.start(joined, self._streams.encoding)
                self._copied[way] = joined, host
        elif self._compressed:
            # One message for all ways. Through the host there is one for each, since another rank
            # may encode there.
            first, *_ = self._compressed
            self._compressed = {first: [one for part in self._compressed.values() for one in part]}
        super()._start()

    def _exchange(self, way, part, bucket, name):
        gather = DeviceAllgather(
            self._path.start_encodings,
            self._buffer.device if self._path.nccl else None,
            self._streams.exchange,
            _refuse,
        )
        return Exchange(gather, bucket, self._adapter.transport, name)

    def _encode_postponed(self):
        self._ready = self._streams.now()  # with zeros in place of old gradients
        super()._encode_postponed()

    def run(self):
        with torch.cuda.stream(self._streams.exchange):
            self._streams.exchange.wait_event(self._ready)
            super().run()
            if self._unsent:  # the other stream adds memories to these gradients
                self._streams.exchange.wait_stream(self._streams.encoding)
            if self._pass.loss_scale is not None:
                self._look_at_all()
            self._pass.device_sums.send()

    def _hand_over(self):
        with torch.cuda.stream(self._streams.exchange):
            super()._hand_over()
            self._finished.set_result(self._buffer)  # it records an event in the current stream

    def _decode(self, part, exchange, total):
        self._count(part, exchange, total)
        started = time.perf_counter()
        by_way: dict[Way, dict] = {}
        for number, (slot, gradient, _) in enumerate(part):
            by_way.setdefault(self._adapter.ways[slot.name], {})[number] = gradient
        for results in by_way.values():
            self._pass.device_sums.decode_some(results, total, 1.0 / self._divisor)
        ended = time.perf_counter()
        for slot, *_ in part:
            slot.decode_seconds += (ended - started) / len(part)
        self._adapter.times.result(exchange.bucket.label, started, ended, EXCHANGES)

    def _bytes_besides_payloads(self, part, channel):
        """Return the bytes of the headers that are sent apart from the payloads with NCCL."""
        return channel.sent_bytes - sum(slot.payload.numel() for slot, *_ in part)

    def _joined(self, way, part):
        return self._copied[way][0] if way in self._copied else super()._joined(way, part)

    def _average(self, way, summed):
        if way in self._copied:
            _, host = self._copied.pop(way)
            self._copies.result()
            average = super()._average(way, host)
            if average is not host:
                return average.to(summed.device)
            return summed.copy_(host, non_blocking=True)
        self._adapter.transport.wait(self._channels[way].allreduce_in_place(summed))
        average = summed.to(torch.promote_types(summed.dtype, torch.float32))
        # a GPU would multiply by the reciprocal of a number of the host, which rounds otherwise
        return average.div_(
            torch.full((), self._divisor, dtype=average.dtype, device=average.device)
        )

    def _look_at(self, slot, result, warns=False):
        """Do nothing: :meth:`run` looks at all gradients at once."""

    def _look_at_all(self):
        """Record, without waiting, which gradients are finite."""
        parts = *self._compressed.values(), *self._uncompressed.values(), self._unsent
        found = [(one[0], one[1]) for one in itertools.chain(*parts) if one[1].numel()]
        if found:
            slots, gradients = zip(*found)
            # a few kernels for all of them; the largest magnitude is finite if all elements are
            finite = torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite()
            copies = CopiesToHost()
            host = copies.start(finite, self._streams.exchange)
            self._pass.verdicts.append((slots, host, copies))


def _refuse(member):
    """Raise the error of a gradient that the GPU could not encode."""
    raise failure_of(member, member.failure) from member.failure
