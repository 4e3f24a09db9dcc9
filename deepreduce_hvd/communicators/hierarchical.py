"""Hierarchical: dense within a host, another scheme across hosts."""

import numpy as np

from deepreduce_hvd import wire
from deepreduce_hvd.codec import Codec
from deepreduce_hvd.communicators.base import Communicator
from deepreduce_hvd.communicators.common_indices import flagged, notices_of
from deepreduce_hvd.communicators.job import Member
from deepreduce_hvd.communicators.partial import Partial, failed, merged
from deepreduce_hvd.communicators.sums import PartialSum
from deepreduce_hvd.errors import DeepReduceError, InvalidArgument
from deepreduce_hvd.index import RawIndex
from deepreduce_hvd.settings import is_integer
from deepreduce_hvd.sparsifiers import NoneSparsifier
from deepreduce_hvd.value import RawValue

_EXACT = Codec(NoneSparsifier(), RawIndex(), RawValue())


class Hierarchical(Communicator):
    """Gradients are summed densely within a host, where links are fast; the first rank of every host exchanges the sum with other hosts by
    ``across`` and hands the result to its host.

    ``ranks_per_host``: hosts hold so many consecutive ranks, as horovodrun numbers them; by default what Horovod says of this host. Only the
    first rank of a host has a memory that fills. Horovod needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1``, and the compressor all ranks.
    """

    def __init__(self, across: Communicator, ranks_per_host: int | None = None) -> None:
        if not isinstance(across, Communicator) or isinstance(across, Hierarchical):
            raise InvalidArgument(f"Hierarchical across: expected another communicator, got {across!r}")
        if ranks_per_host is not None and (not is_integer(ranks_per_host) or ranks_per_host < 1):
            raise InvalidArgument(f"Hierarchical ranks_per_host: expected an integer of at least 1, got {ranks_per_host!r}")
        self.across = across
        self.ranks_per_host = ranks_per_host

    @property
    def puts_back(self):
        return self.across.puts_back

    def check(self, codec, memory):
        self.across.check(codec, memory)

    def keeper_of(self, rank, transport):
        return rank - rank % self._count(transport)

    def depends_on(self, transport):
        return {"ranks per host": self._count(transport)}

    def _count(self, transport):
        return transport.local_size if self.ranks_per_host is None else self.ranks_per_host

    def reset(self):
        self.across.reset()

    def prepare(self, transport):
        _, across = transport.by_host(self.ranks_per_host)
        if across is not None:
            self.across.prepare(across)

    def exchange(self, job, channel):
        within, across = channel.by_host(self.ranks_per_host)
        own = self._dense(job)
        total = yield within.allreduce(flagged(job.d, own))
        if total[-2] > 0:
            local = yield within.allgather(notices_of(own))
            local = merged([local], job.d, job.rank)
        else:
            local = Partial(non_finite=True) if total[-1] > 0 or not np.isfinite(total).all() else Partial(values=total[:-2])
        message = None
        if within.rank == 0:
            try:
                message = self._result(job, (yield from self.across.exchange(_host_job(job, local), across)))
            except DeepReduceError as error:  # the other ranks of the host hear of it too
                message = wire.write_notice(str(error))
            except Exception as error:  # the same: they would wait for ever
                message = failed(job.rank, error).message(job.d)
        message = yield within.broadcast(message, 0)
        return PartialSum(job, merged([message], job.d, job.rank))

    @staticmethod
    def _dense(job):
        """This rank's gradients as one float32 array, in a Partial of all elements."""
        try:
            for member in job.members:
                if member.failure is not None:
                    raise member.failure
            values = np.concatenate([member.as_float32() for member in job.members])
        except Exception as error:
            return failed(job.rank, error)
        return Partial(values=values) if np.isfinite(values).all() else Partial(non_finite=True)

    @staticmethod
    def _result(job, total):
        """The sum over all hosts, as a message to the ranks of this one."""
        members = range(len(job.members))
        if any(total.non_finite(number) for number in members):
            return Partial(non_finite=True).message(job.d)
        parts = [total.sparse(number, 1.0) for number in members]
        indices = np.concatenate([part + np.uint32(start) for (part, _), start in zip(parts, job.offsets)])
        return job.code(Partial(indices, np.concatenate([values for _, values in parts])), 0, 0, _EXACT)


def _host_job(job, local):
    """The same bucket with the host's sum in place of this rank's gradients."""
    members = []
    for number, member in enumerate(job.members):
        start, end = job.offsets[number : number + 2]
        if local.failure is not None:
            values, failure = np.broadcast_to(np.float32(0), end - start), RuntimeError(local.failure)
        else:
            values, failure = np.full(end - start, np.nan, dtype=np.float32) if local.non_finite else local.values[start:end], None
        held = member.held and not values.any()  # no rank of this host has learnt anything of it
        members.append(Member(member.name, values, member.state, member.key, 0, member.threshold, held=held))
        members[-1].failure = failure
    return job.of(members)
