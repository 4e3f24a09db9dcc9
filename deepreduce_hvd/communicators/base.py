"""What a communicator is written against, so that it knows no framework; and what it gives back."""

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Memory

if TYPE_CHECKING:
    from deepreduce_hvd.codec import Codec
    from deepreduce_hvd.communicators.bucket import Bucket
    from deepreduce_hvd.communicators.exchange import Channel

_PAUSE_SECONDS = 5e-5


class Transport:
    """The collectives of one group of ranks, asynchronous and named, on NumPy arrays; an adapter
    implements it over Horovod.

    Every collective is started by all ranks under the same name, which is unique among those in
    flight, and returns a handle at once.
    """

    #: how many ranks exchange, and which of them this is
    size: int
    rank: int
    #: how many ranks this host has
    local_size: int

    @property
    def ranks(self) -> list[int]:
        """What the ranks of the group are called outside of it, in order."""
        return list(range(self.size))

    def allgather(self, array: np.ndarray, name: str) -> Any:
        """Starts gathering every rank's (n,) uint8 array, lengths may differ; the result is their
        concatenation in rank order.
        """
        raise NotImplementedError

    def alltoall(self, parts: Sequence[np.ndarray], name: str) -> Any:
        """Starts handing ``parts[i]``, (n,) uint8, to rank i, lengths may differ; the result is the
        list of the parts from every rank.
        """
        raise NotImplementedError

    def broadcast(self, array: np.ndarray | None, root: int, name: str) -> Any:
        """Starts handing rank ``root``'s (n,) uint8 array to all; the others give None. The result
        is the array.
        """
        raise NotImplementedError

    def allreduce(self, array: np.ndarray, name: str) -> Any:
        """Starts the sum of every rank's (n,) float32 array, equal lengths; the result is the same
        on all ranks, bit for bit.
        """
        raise NotImplementedError

    def by_host(self, ranks_per_host: int | None) -> tuple["Transport", "Transport | None"]:
        """(transport of this rank's host, transport of the hosts' first ranks or None on the
        others).

        Hosts hold ``ranks_per_host`` consecutive ranks; None leaves it to the adapter. All ranks
        call it before any of them exchanges.
        """
        raise NotImplementedError

    def test(self, handle: Any) -> bool:
        """Whether :meth:`wait` would return at once."""
        raise NotImplementedError

    def wait(self, handle: Any) -> Any:
        """The result of a collective."""
        raise NotImplementedError

    def pause(self) -> None:
        """Sleeps for a moment between two tests: a rank that spins takes the processor from those
        that it waits for.
        """
        time.sleep(_PAUSE_SECONDS)


class Communicator:
    """How what all ranks send of one bucket becomes their sum; a subclass is one file. An instance
    serves all buckets of a compressor.
    """

    #: whether what it drops or loses of a sum goes back to memories, by their put_back
    puts_back = True

    def check(self, codec: "Codec", memory: Memory) -> None:
        """Raises InvalidArgumentError when the scheme cannot work with these stages."""

    def keeper_of(self, rank: int, transport: Transport) -> int:
        """The rank whose memory takes what ``rank`` keeps back: itself, unless the scheme sends for
        it from another one.
        """
        return rank

    def depends_on(self, transport: Transport) -> dict[str, Any]:
        """What the scheme finds out about this rank and all ranks must find alike, {what: a number
        or text}.
        """
        return {}

    def prepare(self, transport: Transport) -> None:
        """Called on all ranks before an exchange is started; may measure the transport."""

    def reset(self) -> None:
        """Called on all ranks when ranks have come or gone: forgets what was found out about them."""

    def exchange(self, bucket: "Bucket", channel: "Channel") -> Generator[Any, Any, Any]:
        """A generator that yields handles of ``channel`` and gets their results; returns the sum
        over all ranks.

        Args:
            bucket: a :class:`~deepreduce_hvd.communicators.bucket.Bucket`, this rank's side of one
                bucket.
            channel: :class:`~deepreduce_hvd.communicators.exchange.Channel`, the transport with
                names of this exchange's own.

        All ranks yield the same collectives in the same order. The sum
        (:mod:`~deepreduce_hvd.communicators.sums`) is bit-identical on all ranks; what a rank drops
        or loses of a partial sum goes back to that rank's memory, so that nothing is lost.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def expect_choice(what, value, choices):
    """``value`` when it is one of ``choices``, or InvalidArgumentError."""
    if not any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in choices
    ):
        raise InvalidArgumentError(
            f"{what}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
        )
    return value
