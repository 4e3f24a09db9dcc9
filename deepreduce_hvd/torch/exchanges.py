"""The exchanges that a compressor has in flight: start them, advance them, wait for them."""

import time

import horovod.torch as hvd

from deepreduce_hvd.communicators.encoding_threads import EncodingThreads

#: exchanges are not tested more often in backward; Horovod itself works once per millisecond
_SECONDS_BETWEEN = 5e-4
#: maximum time in seconds to wait for the other ranks' backward passes
_MOST_SECONDS = 5.0


class Exchanges:
    """The exchanges of one compressor that are in flight.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        device_path: its :class:`~deepreduce_hvd.torch.cuda.device.DevicePath`.
        times: its :class:`~deepreduce_hvd.planning.step_times.StepTimes`.
    """

    def __init__(self, compressor, device_path, times):
        self._compressor = compressor
        self._device_path = device_path
        self._times = times
        self._threads = EncodingThreads(compressor.threads, hvd.local_size())
        self.forget()

    def forget(self):
        """Forget all exchanges in flight, and that the communicator is prepared."""
        self._threads.settle()
        self._in_flight = []
        self._advanced_at = 0.0
        self._prepared = False

    def settle(self):
        """Wait for the threads, before anything else reads or writes memories."""
        self._threads.settle()

    def encode_early(self, flight, slot, member):
        """Let a thread encode a gradient while backward makes others, if its message allows it.

        Args:
            flight: the flight of the gradient's bucket.
            slot: slot of the gradient's parameter, whose step has the gradient.
            member: the gradient's bucket member.
        """
        communicator = flight.communicator or self._compressor.communicator
        if not (communicator.sends_payloads and flight.on_host):
            return
        policy, seed = slot.policy, self._compressor.seed
        encoding = self._threads.start(
            member, policy.codec, policy.memory, seed, slot.steps - 1, hvd.rank()
        )
        if encoding is not None:
            slot.encoding = encoding
            flight.encodings.append(encoding)

    def start_early(self, flight, transport):
        """Start the exchange of a full bucket, unless the communicator is not yet prepared."""
        if self._prepared:
            self._start(flight, transport)

    def advance(self, now):
        """Advance all exchanges as far as possible without waiting, if it is time to.

        Args:
            now: time of ``time.perf_counter``.
        """
        if now - self._advanced_at < _SECONDS_BETWEEN:
            return
        self._advanced_at = now
        for exchange in self._in_flight:
            exchange.advance()
        self._drop_done()

    def wait_until_sent(self, flights, transport):
        """Wait until all exchanges that have started have sent their first messages.

        They wait for the roll call, so this ends when all ranks have begun their backward pass. A
        rank without any gradient of this step may use a collective of the program before it joins
        the roll call, so the time is limited.
        """
        started = [flight.exchange for flight in flights if flight.exchange is not None]
        since = time.perf_counter()
        deadline = since + _MOST_SECONDS
        while not all(exchange.has_sent for exchange in started):
            # a list, so that all of them advance
            if any([exchange.advance() for exchange in started]):  # noqa: C419
                since = time.perf_counter()
            elif time.perf_counter() > deadline:
                return
            else:
                transport.pause(since)

    def run(self, step, beside, transport):
        """Start the exchanges of a step that have not started, and wait for all of them.

        Once a result is requested, all gradients of the step have come. A bucket that is not full
        then has parameters without a gradient in this step.

        Args:
            step: the :class:`~deepreduce_hvd.torch.optimizer_steps.OptimizerStep`.
            beside: function of the step that returns flights of other steps, to start too.
            transport: the transport.
        """
        if step.exchanged:
            return
        self._prepare(transport)
        flights = step.flights
        if any(flight.exchange is None for flight in flights):  # at the first result of the step
            for flight in [*flights, *beside(step)]:
                if flight.exchange is None:
                    self._start(flight, transport)
        # wait for all exchanges here, in a wait that sleeps; Horovod's own wait between two results
        # spins
        for flight in flights:
            flight.exchange.wait(self._in_flight)
        self._drop_done()
        step.exchanged = True

    def _prepare(self, transport):
        """Let the communicator measure, or create process sets, before its first exchange.

        Ranks wait for each other there. In a backward hook this could deadlock: another rank may
        miss gradients of this bucket, and may wait in its next hook for another compressor's
        handshake. Once a result is requested, all hooks have run.
        """
        if not self._prepared:
            self._compressor.communicator.prepare(transport)
            self._prepared = True

    def _start(self, flight, transport):
        communicator = self._device_path.communicator(flight.members, flight.communicator)
        flight.start(self._compressor, transport, communicator, hvd.rank())
        self._in_flight.append(flight.exchange)

    def _drop_done(self):
        for exchange in self._in_flight:
            if exchange.done:
                for member in exchange.bucket.members:
                    if member.encoding is not None and member.encoding.times is not None:
                        self._times.encoded(member.name, *member.encoding.times)
                self._times.message(exchange.bucket.label, exchange.started_at, exchange.ended_at)
        self._in_flight = [exchange for exchange in self._in_flight if not exchange.done]
