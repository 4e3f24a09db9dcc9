"""The exchanges that a compressor has in flight: start them, advance them, wait for them."""

import horovod.torch as hvd


class Exchanges:
    """The exchanges of one compressor that are in flight.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        device_path: its :class:`~deepreduce_hvd.torch.cuda.device.DevicePath`.
        times: its :class:`~deepreduce_hvd.step_times.StepTimes`.
    """

    def __init__(self, compressor, device_path, times):
        self._compressor = compressor
        self._device_path = device_path
        self._times = times
        self.forget()

    def forget(self):
        """Forget all exchanges in flight, and that the communicator is prepared."""
        self._in_flight = []
        self._prepared = False

    def start_early(self, flight, transport):
        """Start the exchange of a full bucket, unless the communicator is not yet prepared."""
        if self._prepared:
            self._start(flight, transport)

    def advance(self):
        """Advance all exchanges as far as possible without waiting."""
        for exchange in self._in_flight:
            exchange.advance()
        self._drop_done()

    def run(self, flights, transport):
        """Start the exchanges of ``flights`` that have not started, and wait for all of them.

        Once a result is requested, all gradients of the step have come. A bucket that is not full
        then has parameters without a gradient in this step.
        """
        self._prepare(transport)
        for flight in flights:
            if flight.exchange is None:
                self._start(flight, transport)
        # wait for all exchanges here, in a wait that sleeps; Horovod's own wait between two results
        # spins
        for flight in flights:
            flight.exchange.wait(self._in_flight)
        self._drop_done()

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
                self._times.message(exchange.bucket.label, exchange.started_at, exchange.ended_at)
        self._in_flight = [exchange for exchange in self._in_flight if not exchange.done]
