"""Hierarchical: dense sums within a host, another communicator across hosts."""

from collections.abc import Generator
from typing import Any

import numpy as np

from deepreduce_hvd.argument_checks import expect_integer
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.base import Communicator, Transport, expect_exchange
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.common_indices import flagged, notices_of
from deepreduce_hvd.communicators.exchange import Channel
from deepreduce_hvd.communicators.sparse_sum import SparseSum, failed, merged
from deepreduce_hvd.communicators.sums import BucketSum, CompleteSum
from deepreduce_hvd.errors import DeepReduceError, InvalidArgumentError
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.stages.base import Memory
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.sparsifiers import NoneSparsifier
from deepreduce_hvd.stages.value_codecs import RawValue

_EXACT = Codec(NoneSparsifier(), RawIndex(), RawValue())


class Hierarchical(Communicator):
    """Communicator that sums densely within each host and compresses only between hosts.

    Gradients are summed densely within a host, where links are fast. The first rank of each host
    exchanges the sum with other hosts by ``across`` and broadcasts the result to the ranks of its
    host. Only the memories of these first ranks are used. Horovod needs
    ``HOROVOD_DYNAMIC_PROCESS_SETS=1``. The compressor must use all ranks, not a process set.

    Args:
        across: the communicator between hosts.
        ranks_per_host: each host has this number of consecutive ranks, as horovodrun numbers them.
            The default is the number of ranks on this host that Horovod reports; with PyTorch's
            DDP, that of the ranks in the model's process group.

    Raises:
        InvalidArgumentError: ``across`` is not a communicator, is another ``Hierarchical``, or has
            no method ``exchange``; or ``ranks_per_host`` is not an integer of at least 1.
    """

    example_arguments = "Allgather()"  # of a call, for suggestions in messages

    def __init__(self, across: Communicator, ranks_per_host: int | None = None) -> None:
        if not isinstance(across, Communicator) or isinstance(across, Hierarchical):
            raise InvalidArgumentError(
                "Hierarchical across: expected a communicator other than Hierarchical, got"
                f" {across!r}"
            )
        expect_exchange("Hierarchical across", across)
        self.across = across
        self.ranks_per_host = None
        if ranks_per_host is not None:
            self.ranks_per_host = expect_integer(
                "Hierarchical ranks_per_host",
                ranks_per_host,
                "an integer of at least 1",
                lambda count: count >= 1,
            )

    @property
    def puts_back(self) -> bool:  # type: ignore[override]  # that of ``across``, read-only
        """Whether the communicator between hosts returns parts of a sum to memories."""
        return self.across.puts_back

    def check(self, codec: Codec, memory: Memory) -> None:
        self.across.check(codec, memory)

    def keeper_of(self, rank: int, transport: Transport) -> int:
        return rank - rank % self._count(transport)

    def depends_on(self, transport: Transport) -> dict[str, Any]:
        return {"ranks per host": self._count(transport)}

    def _count(self, transport):
        return transport.local_size if self.ranks_per_host is None else self.ranks_per_host

    def reset(self) -> None:
        self.across.reset()

    def prepare(self, transport: Transport) -> None:
        _, across = transport.by_host(self.ranks_per_host)
        if across is not None:
            self.across.prepare(across)

    def exchange(self, bucket: Bucket, channel: Channel) -> Generator[Any, Any, BucketSum]:
        within, across = channel.by_host(self.ranks_per_host)
        own = self._dense(bucket)
        total = yield within.allreduce(flagged(bucket.d, own))
        if total[-2] > 0:
            local = yield within.allgather(notices_of(own))
            local = merged([local], bucket.d, bucket.rank)
        else:
            local = (
                SparseSum(non_finite=True)
                if total[-1] > 0 or not np.isfinite(total).all()
                else SparseSum(values=total[:-2])
            )
        message = None
        if across is not None:  # this is the first rank of its host
            try:
                message = self._result(
                    bucket, (yield from self.across.exchange(_host_bucket(bucket, local), across))
                )
            except DeepReduceError as error:  # tell the other ranks of the host
                message = wire.write_notice(str(error))
            except Exception as error:  # the same for any other error, or they would wait forever
                message = failed(bucket.rank, error).message(bucket.d)
        message = yield within.broadcast(message, 0)
        return CompleteSum(bucket, merged([message], bucket.d, bucket.rank))

    @staticmethod
    def _dense(bucket):
        """Return this rank's gradients as a SparseSum of one float32 array with all elements."""
        try:
            for member in bucket.members:
                if member.failure is not None:
                    raise member.failure
            values = np.concatenate([member.as_float32() for member in bucket.members])
        except Exception as error:
            return failed(bucket.rank, error)
        return SparseSum(values=values) if np.isfinite(values).all() else SparseSum(non_finite=True)

    @staticmethod
    def _result(bucket, total):
        """Return the sum over all hosts as a message to the ranks of this host."""
        members = range(len(bucket.members))
        if any(total.non_finite(number) for number in members):
            return SparseSum(non_finite=True).message(bucket.d)
        parts = [total.sparse(number, 1.0) for number in members]
        indices = np.concatenate(
            [part + np.uint32(start) for (part, _), start in zip(parts, bucket.offsets)]
        )
        return bucket.code(
            SparseSum(indices, np.concatenate([values for _, values in parts])), 0, 0, _EXACT
        )


def _host_bucket(bucket, local):
    """Return the bucket with the sum of this host in place of this rank's gradients."""
    members = []
    for number, member in enumerate(bucket.members):
        start, end = bucket.offsets[number : number + 2]
        if local.failure is not None:
            values, failure = (
                np.broadcast_to(np.float32(0), end - start),
                RuntimeError(local.failure),
            )
        else:
            values, failure = (
                np.full(end - start, np.nan, dtype=np.float32)
                if local.non_finite
                else local.values[start:end],
                None,
            )
        # no rank of this host has a gradient for it
        held = member.held and not is_nonzero(values).any()
        members.append(
            BucketMember(
                member.name, values, member.state, member.key, 0, member.threshold, held=held
            )
        )
        members[-1].failure = failure
    return bucket.of(members)
