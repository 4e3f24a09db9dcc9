"""Base classes of communicators and transports, independent of any framework."""

import math
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepreduce_hvd.argument_checks import is_integer
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Memory

if TYPE_CHECKING:
    from deepreduce_hvd.codec import Codec
    from deepreduce_hvd.communicators.bucket import Bucket
    from deepreduce_hvd.communicators.exchange import Channel
    from deepreduce_hvd.communicators.given_vectors import GivenVector

#: pauses between two tests of a collective: a part of the wait so far, within these seconds
_PART_OF_WAIT, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 5e-5, 1e-3


class Transport:
    """Named, asynchronous collectives of one group of ranks, on NumPy arrays.

    An adapter implements a transport with Horovod or with torch.distributed. All ranks start a
    collective under the same name. The name is unique among the collectives in flight. Each method
    that starts a collective returns a handle at once, for :meth:`test` and :meth:`wait`.
    """

    #: The number of ranks in the group, and the number of this rank within it.
    size: int
    rank: int
    #: The number of ranks on this host.
    local_size: int
    #: The most bytes that a rank can send, and the most that it can receive, in one collective.
    most_bytes: float = math.inf
    #: Whether this rank is in the group; ``rank`` is an error otherwise.
    includes_this_rank: bool = True

    def sums_float16(self, on_host: bool) -> bool:
        """Return whether an allreduce of float16 is right but for rounding.

        Args:
            on_host: whether the tensors are on the host.

        Returns:
            False if it may omit the numbers of some ranks.
        """
        return True

    @property
    def ranks(self) -> list[int]:
        """The global numbers of the ranks of the group, in order."""
        return list(range(self.size))

    def allgather(self, array: np.ndarray, name: str) -> Any:
        """Start an allgather.

        Args:
            array: (n,) uint8. Lengths can differ between ranks.
            name: the name of the collective.

        Returns:
            A handle. The result of the collective is the concatenation of all arrays in rank order,
            (m,) uint8.
        """
        raise NotImplementedError

    def alltoall(self, parts: Sequence[np.ndarray], name: str) -> Any:
        """Start an alltoall.

        Args:
            parts: one (n,) uint8 array for each rank; ``parts[i]`` is sent to rank i. Lengths can
                differ.
            name: the name of the collective.

        Returns:
            A handle. The result of the collective is a list of (n,) uint8 arrays, the parts that
            this rank received from every rank, in rank order.
        """
        raise NotImplementedError

    def broadcast(self, array: np.ndarray | None, root: int, name: str) -> Any:
        """Start a broadcast.

        Args:
            array: (n,) uint8 on rank ``root``, None on all other ranks.
            root: the rank that sends.
            name: the name of the collective.

        Returns:
            A handle. The result of the collective is the array of rank ``root``, (n,) uint8.
        """
        raise NotImplementedError

    def allreduce(self, array: np.ndarray, name: str) -> Any:
        """Start a sum over all ranks.

        Args:
            array: (n,) float32, of the same length on all ranks.
            name: the name of the collective.

        Returns:
            A handle. The result of the collective is the sum, (n,) float32, bit-identical on all
            ranks.
        """
        raise NotImplementedError

    def by_host(self, ranks_per_host: int | None) -> tuple["Transport", "Transport | None"]:
        """Return the transports for communication within a host and across hosts.

        All ranks must call this method before any of them uses the transports.

        Args:
            ranks_per_host: each host has this number of consecutive ranks. None lets the adapter
                decide.

        Returns:
            A tuple (transport of this rank's host, transport of the first ranks of all hosts). The
            second one is None on ranks that are not the first of their host.
        """
        raise NotImplementedError

    def test(self, handle: Any) -> bool:
        """Return whether a collective is complete.

        Args:
            handle: the handle of the collective.

        Returns:
            True if :meth:`wait` would return without waiting.
        """
        raise NotImplementedError

    def wait(self, handle: Any) -> Any:
        """Wait for a collective.

        Args:
            handle: the handle of the collective.

        Returns:
            The result of the collective, as described for the method that started it.
        """
        raise NotImplementedError

    def pause(self, since: float) -> None:
        """Sleep for a moment between two calls of :meth:`test`.

        A rank that polls takes processor time from the ranks that it waits for. So the pauses of a
        long wait are longer: the result is found at most a tenth of the wait late.

        Args:
            since: time of ``time.perf_counter`` when the wait began or last made progress.
        """
        waited = time.perf_counter() - since
        time.sleep(min(max(_PART_OF_WAIT * waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))


class Communicator:
    """Base class of communicators, which turn the payloads of all ranks into their sum.

    One instance serves all buckets of a compressor.
    """

    #: Whether the parts of a sum that are dropped or lost go back to memories with ``put_back``.
    puts_back = True

    #: Whether a rank sends the payload of each gradient, made from that gradient alone. Threads may
    #: then encode gradients before the message begins. A class that overrides ``exchange`` does not
    #: inherit True.
    sends_payloads = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "exchange" in vars(cls) and "sends_payloads" not in vars(cls):
            cls.sends_payloads = False

    def check(self, codec: "Codec", memory: Memory) -> None:
        """Check that this communicator can work with these stages.

        Args:
            codec: the codec of a bucket.
            memory: the memory of a bucket.

        Raises:
            InvalidArgumentError: it cannot.
        """

    def keeper_of(self, rank: int, transport: Transport) -> int:
        """Return the rank whose memory stores the residual of a rank.

        Args:
            rank: the rank.
            transport: the transport of the group of ranks.

        Returns:
            ``rank``, unless another rank sends on its behalf.
        """
        return rank

    def depends_on(self, transport: Transport) -> dict[str, Any]:
        """Return facts on which exchanges depend and which must be equal on all ranks.

        All ranks compare them before the first exchange.

        Args:
            transport: the transport of the group of ranks.

        Returns:
            A dictionary from descriptions to numbers or texts.
        """
        return {}

    def prepare(self, transport: Transport) -> None:
        """Prepare for exchanges.

        All ranks call this method before the first exchange starts. A communicator can measure the
        transport here.

        Args:
            transport: the transport of the group of ranks.
        """

    def known(self, bucket: "GivenVector", transport: Transport) -> list[float]:
        """Return what this rank knows from earlier sums of vectors and can use in the next one.

        Ranks send each other these numbers before each sum of :func:`sparse_allreduce`.

        Args:
            bucket: the :class:`~deepreduce_hvd.communicators.given_vectors.GivenVector` of this
                rank. Its codec is not known yet.
            transport: the transport of the group of ranks.

        Returns:
            Finite numbers of at least 0; none if this rank knows nothing.
        """
        return []

    def exchange_vector(
        self, bucket: "GivenVector", channel: "Channel", known: list[float]
    ) -> Generator[Any, Any, Any]:
        """Exchange a vector of :func:`sparse_allreduce`.

        This method is a generator like :meth:`exchange`. Several such exchanges can be in flight,
        and ranks advance them in different orders. So a rank must not wait for other ranks here,
        except by yielding a handle, and ranks must not depend on the order in which exchanges end.
        Override it if :meth:`prepare` waits for other ranks.

        Args:
            bucket: the :class:`~deepreduce_hvd.communicators.given_vectors.GivenVector` of this
                rank.
            channel: as for :meth:`exchange`.
            known: what :meth:`known` returned on rank 0; empty if a rank knows nothing, for
                instance because it has joined an elastic job.

        Returns:
            The sum over all ranks, as from :meth:`exchange`.
        """
        self.prepare(channel.transport)
        return (yield from self.exchange(bucket, channel))

    def reset(self) -> None:
        """Forget all facts about the ranks.

        All ranks call this method after ranks were added or removed.
        """

    def exchange(self, bucket: "Bucket", channel: "Channel") -> Generator[Any, Any, Any]:
        """Exchange one bucket.

        This method is a generator. It yields handles of ``channel`` and receives the results of
        their collectives. All ranks yield the same collectives in the same order. The sum is
        bit-identical on all ranks. The part of a partial sum that a rank drops or loses goes back
        to the memory of that rank, so nothing is lost.

        Args:
            bucket: a :class:`~deepreduce_hvd.communicators.bucket.Bucket`, the gradients of this
                rank.
            channel: a :class:`~deepreduce_hvd.communicators.exchange.Channel`, which starts the
                collectives of this exchange.

        Returns:
            The sum over all ranks, such as a
            :class:`~deepreduce_hvd.communicators.sums.CompleteSum`.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self))))  # as of stages


def expect_exchange(what, communicator):
    """Raise InvalidArgumentError if the class of a communicator has no ``exchange``."""
    if type(communicator).exchange is Communicator.exchange:
        raise InvalidArgumentError(
            f"{what}: expected a Communicator with a method exchange(bucket, channel), got "
            f"{type(communicator).__name__} without it"
        )


def expect_choice(what, value, choices):
    """Return ``value`` if it is one of ``choices``; raise InvalidArgumentError otherwise."""
    value = int(value) if is_integer(value) else value
    if not any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in choices
    ):
        raise InvalidArgumentError(
            f"{what}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
        )
    return value
