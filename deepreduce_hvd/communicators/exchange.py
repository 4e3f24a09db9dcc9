"""Run exchanges: the rounds of all pending exchanges advance together.

A step then has the latency of one exchange instead of the sum over all exchanges.
"""

import threading
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from deepreduce_hvd.arrays import describe
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.base import Communicator, Transport
from deepreduce_hvd.communicators.bucket import Bucket
from deepreduce_hvd.communicators.sparse_sum import SparseSum
from deepreduce_hvd.communicators.sums import BucketSum
from deepreduce_hvd.errors import InvalidArgumentError

#: How many gradients of an exchange a message names.
_NAMES_SHOWN = 3
#: what is never a handle; each transport has handles of its own types
_NO_HANDLES = (type(None), SparseSum)


class Channel:
    """The transport of one exchange. It makes the names of collectives and counts bytes.

    Each method that starts a collective returns a handle, which ``exchange`` yields. Messages are
    what :meth:`Bucket.code` and :meth:`Bucket.encode` return. If they are too large for a
    collective, notices take their place, so that all ranks raise an error.

    Args:
        transport: the :class:`~deepreduce_hvd.Transport` of the group of ranks.
        name: the first part of the names of the collectives.
        parent: the channel that counts this one's bytes and rounds too, or None.

    Attributes:
        size: the number of ranks.
        rank: the number of this rank.
        sent_bytes: the bytes that this rank has handed to collectives.
        rounds: the number of collectives that have started.
        prefix: the first part of the names of the collectives.
        in_groups: whether the exchange uses collectives of subgroups of the ranks.
    """

    def __init__(self, transport: Transport, name: str, parent: "Channel | None" = None) -> None:
        self.size = transport.size
        self.rank = transport.rank
        self.sent_bytes = 0
        self.rounds = 0
        self.in_groups = False
        self.transport = transport
        self.prefix = name
        self._parent = parent

    def by_host(self, ranks_per_host: int | None) -> "tuple[Channel, Channel | None]":
        """Return the channels within a host and across hosts, as :meth:`Transport.by_host`.

        Args:
            ranks_per_host: each host has this number of consecutive ranks. None lets the adapter
                decide.

        Returns:
            A tuple (channel of this rank's host, channel of the first ranks of all hosts). The
            second one is None on ranks that are not the first of their host.
        """
        self.in_groups = True
        within, across = self.transport.by_host(ranks_per_host)
        of_hosts = None if across is None else Channel(across, f"{self.prefix}.across", self)
        return Channel(within, f"{self.prefix}.within", self), of_hosts

    @property
    def name(self) -> str:
        """The name of the collective that is in flight."""
        return f"{self.prefix}.{self.rounds}"

    def _next(self, sent: int) -> str:
        self._count(sent)
        return self.name

    def _count(self, sent: int) -> None:
        self.sent_bytes += sent
        self.rounds += 1
        if self._parent is not None:
            self._parent._count(sent)

    def allgather(self, array: np.ndarray) -> Any:
        """Start an allgather.

        Args:
            array: (n,) uint8, messages one after another. Lengths can differ between ranks.

        Returns:
            A handle. The result is the concatenation of all arrays in rank order, (m,) uint8.
        """
        array = self._limited(array, self.size)
        return self.transport.allgather(array, self._next(array.nbytes))

    def alltoall(self, parts: Sequence[np.ndarray], senders: int | None = None) -> Any:
        """Start an alltoall.

        Args:
            parts: one (n,) uint8 array for each rank, empty or a message. Lengths can differ.
            senders: the most ranks that send a part that is not empty to the same rank. The default
                is the number of ranks.

        Returns:
            A handle. The result is a list of (n,) uint8 arrays, the parts for this rank in rank
            order.
        """
        parts = [self._limited(part, self.size if senders is None else senders) for part in parts]
        return self.transport.alltoall(
            parts,
            self._next(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)),
        )

    def broadcast(self, array: np.ndarray | None, root: int) -> Any:
        """Start a broadcast.

        Args:
            array: (n,) uint8 on rank ``root``, a message; None on all other ranks.
            root: the rank that sends.

        Returns:
            A handle. The result is the array of rank ``root``, (n,) uint8.
        """
        array = None if array is None else self._limited(array, 1)
        return self.transport.broadcast(
            array, root, self._next(0 if array is None else array.nbytes)
        )

    def size_notice(self, size: int, senders: int) -> np.ndarray | None:
        """Compare the size of messages with what a collective can bring to a rank.

        A rank does not know how much the others send. So it compares its own messages with the part
        that each sender may take.

        Args:
            size: the number of bytes of the messages.
            senders: the number of ranks that may send as much to the same rank.

        Returns:
            None, or the notice to send in place of messages that are too large, (n,) uint8.
        """
        most = self.transport.most_bytes
        if size * senders <= most:
            return None
        return wire.size_notice(size, senders, int(most), self.transport.ranks[self.rank])

    def _limited(self, messages: np.ndarray, senders: int) -> np.ndarray:
        refusal = self.size_notice(messages.nbytes, senders)
        return messages if refusal is None else wire.refusal_of(messages, refusal)

    def allreduce(self, array: np.ndarray) -> Any:
        """Start a sum over all ranks.

        Args:
            array: (n,) float32, of the same length on all ranks.

        Returns:
            A handle. The result is the sum, (n,) float32, bit-identical on all ranks.

        Raises:
            InvalidArgumentError: not such an array.
        """
        good = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.ndim == 1
        if not good:
            raise InvalidArgumentError(
                f"allreduce: expected an (n,) float32 NumPy array, got {describe(array)}"
            )
        return self.transport.allreduce(array, self._next(array.nbytes))

    def allreduce_in_place(self, array: Any) -> Any:
        """Start a sum over all ranks in the memory of a tensor.

        Only transports of torch.distributed and of Horovod for PyTorch can do this.

        Args:
            array: a contiguous tensor, of the same shape and dtype on all ranks.

        Returns:
            A handle. The tensor contains the sum when the collective is complete.
        """
        transport: Any = self.transport
        return transport.allreduce_in_place(array, self._next(array.nbytes))


def steps_of(
    communicator: Communicator, bucket: Bucket, channel: Channel
) -> Generator[Any, Any, BucketSum]:
    """Run ``communicator.exchange``, and check that it keeps to its interface.

    Args:
        communicator, bucket: as for :class:`Exchange`.
        channel: the channel of the exchange.

    Returns:
        The sum.

    Raises:
        InvalidArgumentError: ``exchange`` is not a generator, yields something that is no handle,
            or returns something that is no sum.
    """
    steps = communicator.exchange(bucket, channel)
    name = f"{type(communicator).__name__}.exchange"
    if not isinstance(steps, Generator):
        raise InvalidArgumentError(
            f"{name}: expected a generator, which yields the handles of its collectives, got a"
            f" method that returned {type(steps).__name__}"
        )
    value = None
    while True:
        try:
            handle = steps.send(value)
        except StopIteration as stop:
            total = stop.value
            break
        if isinstance(handle, _NO_HANDLES):
            raise InvalidArgumentError(
                f"{name}: expected it to yield a handle, as the methods of its channel return, got"
                f" {type(handle).__name__}"
            )
        value = yield handle
    if not isinstance(total, BucketSum):
        raise InvalidArgumentError(
            f"{name}: expected it to return a BucketSum, got {type(total).__name__}"
        )
    return total


class Exchange:
    """A running exchange of one bucket.

    When ``done`` is True, ``result`` holds the sum or ``error`` holds the exception.

    Args:
        communicator: the communicator whose ``exchange`` method is run.
        bucket: the bucket to exchange.
        transport: the transport of the group of ranks.
        name: the first part of the names of its collectives, unique among the exchanges in flight.
        before: a generator that runs first and yields handles too, or None. If it raises, nothing
            is exchanged.

    Attributes:
        name: the first part of the names of its collectives.
        done: whether the exchange has ended.
        result: the sum over all ranks, once done.
        error: the exception that the generator raised, or None.
        seconds: the time spent in the generator, in seconds.
        started_at, ended_at: times of ``time.perf_counter``; ``ended_at`` is when this rank found
            out that the exchange had ended, None before that.
    """

    def __init__(
        self,
        communicator: Communicator,
        bucket: Bucket,
        transport: Transport,
        name: str,
        before: Generator[Any, Any, Any] | None = None,
    ) -> None:
        self.name = name
        self.bucket = bucket
        bucket.scheme = repr(communicator)
        self.channel = Channel(transport, name)
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.started_at = time.perf_counter()
        self.ended_at: float | None = None
        self._transport = transport
        self._generator = self._steps(communicator, before)
        self._handle: Any = None
        self._lock = threading.Lock()  # held by the thread that advances the exchange
        self._send(None)

    def _steps(
        self, communicator: Communicator, before: Generator[Any, Any, Any] | None
    ) -> Generator[Any, Any, Any]:
        if before is not None:
            yield from before
        return (yield from steps_of(communicator, self.bucket, self.channel))

    def _send(self, value: Any) -> None:
        started = time.perf_counter()
        done = True
        try:
            self._handle = self._generator.send(value)
            done = False
        except StopIteration as stop:
            self.result = stop.value
        # keep the error for finish(); another exchange may be the one that waits here
        except Exception as error:
            self.error = error
        now = time.perf_counter()
        self.seconds += now - started
        if done:
            self.ended_at = now
            self.done = True  # last, because other threads read it

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return whether there was progress."""
        moved = False
        if not self._lock.acquire(blocking=False):
            return moved  # another thread advances it
        try:
            while not self.done and self._transport.test(self._handle):
                self._send(self._transport.wait(self._handle))
                moved = True
        finally:
            self._lock.release()
        return moved

    @property
    def has_sent(self) -> bool:
        """Whether its first message is under way, or it has ended."""
        with self._lock:  # another thread may be sending it
            return self.done or self.channel.rounds > 0

    def proceed_from(self, handle: Any) -> None:
        """Advance by one step if the exchange waits for ``handle``, which is done.

        A thread that encodes calls this. It never waits for a collective: the errors of collectives
        belong to the thread that waits for the result.

        Args:
            handle: a handle with ``query()`` whose result is None.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self.done and self._handle is handle and handle.query():
                self._send(None)
        finally:
            self._lock.release()

    def wait(self, pending: "Iterable[Exchange]" = ()) -> None:
        """Wait until the exchange is done; advance the exchanges in ``pending`` meanwhile."""
        since = time.perf_counter()
        while not self.done:
            # a list, so that all of them advance
            if any([exchange.advance() for exchange in (self, *pending)]):  # noqa: C419
                since = time.perf_counter()
            else:
                self._transport.pause(since)

    def encode_seconds(self, number: int) -> float:
        """Return a member's encoding seconds: its thread's, plus its share of the exchange's."""
        early, offsets = self.bucket.members[number].encoding, self.bucket.offsets
        share = float(offsets[number + 1] - offsets[number]) / max(self.bucket.d, 1)
        return self.seconds * share + (0.0 if early is None else early.seconds)

    def describe(self) -> str:
        """Return a description of what the exchange is waiting for."""
        names = [member.name for member in self.bucket.members]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"the exchange {self.channel.name} of {', '.join(names[:_NAMES_SHOWN])}{more}"

    def finish(self) -> Any:
        """Wait for the sum and return it; raise the error if the exchange failed."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.result
