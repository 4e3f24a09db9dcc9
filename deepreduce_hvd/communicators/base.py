"""What a communicator is written against, so that it knows no framework."""


class Transport:
    """The collectives of one group of ranks, asynchronous and named; an adapter implements it over Horovod.

    Arrays are 1-D uint8 of the adapter's framework. Names must be equal on all ranks and unique among the exchanges
    in flight.
    """

    #: how many ranks exchange, and which of them this is
    size = None
    rank = None

    def allgather(self, array, name):
        """Starts gathering every rank's array, lengths may differ; returns a handle."""
        raise NotImplementedError

    def wait(self, handle):
        """The concatenation of all ranks' arrays in rank order."""
        raise NotImplementedError


class Communicator:
    """How the payloads of one parameter meet. Stateless: ``start`` returns what ``finish`` needs."""

    def start(self, transport, payload, name):
        """Starts the exchange of this rank's ``payload``; returns a handle at once."""
        raise NotImplementedError

    def finish(self, transport, handle):
        """Waits; returns the payloads to sum, as an array that holds them one after another, in rank order."""
        raise NotImplementedError

    def __repr__(self):
        return f"{type(self).__name__}()"
