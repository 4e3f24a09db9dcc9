"""The driver: rounds of all pending exchanges advance together, so that a step costs the latency of one exchange."""


class Channel:
    """A transport as one exchange sees it: names made of the exchange's own, bytes counted."""

    def __init__(self, transport, name):
        self.size = transport.size
        self.rank = transport.rank
        self.sent_bytes = 0
        self.rounds = 0
        self._transport = transport
        self._name = name

    def _next(self):
        self.rounds += 1
        return f"{self._name}.{self.rounds}"

    def allgather(self, array):
        self.sent_bytes += array.nbytes
        return self._transport.allgather(array, self._next())

    def alltoall(self, parts):
        self.sent_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return self._transport.alltoall(parts, self._next())

    def broadcast(self, array, root):
        self.sent_bytes += 0 if array is None else array.nbytes
        return self._transport.broadcast(array, root, self._next())

    def allreduce(self, array):
        self.sent_bytes += array.nbytes
        return self._transport.allreduce(array, self._next())


class Exchange:
    """One communicator's generator on its way: ``done`` with ``result``, or with the ``error`` that it raised."""

    def __init__(self, communicator, job, transport, name):
        self.job = job
        self.channel = Channel(transport, name)
        self.done = False
        self.result = None
        self.error = None
        self._transport = transport
        self._generator = communicator.exchange(job, self.channel)
        self._handle = None
        self._send(None)

    def _send(self, value):
        try:
            self._handle = self._generator.send(value)
        except StopIteration as stop:
            self.result = stop.value
            self.done = True
        except Exception as error:  # raised where the exchange is finished, not where another one's progress found it
            self.error = error
            self.done = True

    def advance(self):
        """As far as it goes without waiting."""
        while not self.done and self._transport.test(self._handle):
            self._send(self._transport.wait(self._handle))

    def finish(self, pending=()):
        """Waits for the sum, while the exchanges of ``pending`` advance too; raises what the exchange raised."""
        self.advance()
        while not self.done:
            self._send(self._transport.wait(self._handle))
            for other in pending:
                other.advance()
        if self.error is not None:
            raise self.error
        return self.result
