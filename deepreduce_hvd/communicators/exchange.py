"""The driver: rounds of all pending exchanges advance together, so that a step costs the latency of
one exchange.
"""

import time

#: how many of an exchange's gradients a message names
_NAMES_SHOWN = 3


class Channel:
    """A transport as one exchange sees it: names made of the exchange's own, bytes counted."""

    def __init__(self, transport, name, parent=None):
        self.size = transport.size
        self.rank = transport.rank
        self.sent_bytes = 0
        self.rounds = 0
        self._transport = transport
        self._name = name
        self._parent = parent

    def by_host(self, ranks_per_host):
        """(channel of this rank's host, channel of the hosts' first ranks or None on the others)."""
        within, across = self._transport.by_host(ranks_per_host)
        pairs = ((within, "within"), (across, "across"))
        return tuple(
            None if one is None else Channel(one, f"{self._name}.{place}", self)
            for one, place in pairs
        )

    @property
    def name(self):
        """Of the collective that is in flight."""
        return f"{self._name}.{self.rounds}"

    def _next(self, sent):
        self._count(sent)
        return self.name

    def _count(self, sent):
        self.sent_bytes += sent
        self.rounds += 1
        if self._parent is not None:
            self._parent._count(sent)

    def allgather(self, array):
        return self._transport.allgather(array, self._next(array.nbytes))

    def alltoall(self, parts):
        return self._transport.alltoall(
            parts,
            self._next(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)),
        )

    def broadcast(self, array, root):
        return self._transport.broadcast(
            array, root, self._next(0 if array is None else array.nbytes)
        )

    def allreduce(self, array):
        return self._transport.allreduce(array, self._next(array.nbytes))


class Exchange:
    """One communicator's generator on its way: ``done`` with ``result``, or with the ``error`` that
    it raised.

    Args:
        communicator: whose ``exchange`` makes the generator.
        bucket: what it is made for.
        transport: of the group of ranks.
        name: of its collectives, unique among what is in flight.
        before: a generator that runs first and yields handles too, or None. When it raises, nothing
            is exchanged.

    Attributes:
        seconds: spent in the generator.
    """

    def __init__(self, communicator, bucket, transport, name, before=None):
        self.bucket = bucket
        bucket.scheme = repr(communicator)
        self.channel = Channel(transport, name)
        self.done = False
        self.result = None
        self.error = None
        self.seconds = 0.0
        self._transport = transport
        self._generator = self._steps(communicator, before)
        self._handle = None
        self._send(None)

    def _steps(self, communicator, before):
        if before is not None:
            yield from before
        return (yield from communicator.exchange(self.bucket, self.channel))

    def _send(self, value):
        started = time.perf_counter()
        try:
            self._handle = self._generator.send(value)
        except StopIteration as stop:
            self.result = stop.value
            self.done = True
        # raised where the exchange is finished, not where another one's progress found it
        except Exception as error:
            self.error = error
            self.done = True
        self.seconds += time.perf_counter() - started

    def advance(self):
        """As far as it goes without waiting; says whether it went on."""
        moved = False
        while not self.done and self._transport.test(self._handle):
            self._send(self._transport.wait(self._handle))
            moved = True
        return moved

    def wait(self, pending=()):
        """Until it is done, while the exchanges of ``pending`` advance too."""
        while not self.done:
            if not any([exchange.advance() for exchange in (self, *pending)]):
                self._transport.pause()

    def describe(self):
        """What it waits for, in words."""
        names = [member.name for member in self.bucket.members]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"the exchange {self.channel.name} of {', '.join(names[:_NAMES_SHOWN])}{more}"

    def finish(self):
        """Waits for the sum; raises what the exchange raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.result
