"""What travels beside payloads: failure notices, and the probe that rides on Horovod's own
allreduce.

A rank that cannot encode its gradient must not leave the others waiting: it sends a notice in the
payload's place, and every rank raises the same error. The bytes of both are the native core's
(csrc/wire.cc).
"""

from typing import NamedTuple

import numpy as np

from deepreduce_hvd import _native
from deepreduce_hvd.errors import InvalidArgumentError, PeerFailedError

#: bytes of a probe: four float32 numbers
PROBE_BYTES = 4 * _native.probe_length


class Message(NamedTuple):
    """One of the messages in a gather: its place, whether it is a payload of NaN or Inf, the text
    if it is a notice.
    """

    start: int
    end: int
    non_finite: bool
    notice: bytes | None


def describe(error):
    """The type and text of a failure, whatever they are: a message that cannot be made must not
    keep the others from hearing of it.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be read"


def notice(error):
    """A failure as (n,) uint8 that takes a payload's place."""
    return write_notice(describe(error))


def write_notice(text):
    """The same of a text. What UTF-8 cannot say, such as half of a pair of UTF-16, is escaped."""
    return _native.write_notice(text.encode(errors="backslashreplace"))


def split(gathered):
    """Cuts (n,) uint8, the concatenated messages of all ranks, into a list of :class:`Message`;
    raises CorruptPayloadError.
    """
    return [Message(*fields) for fields in _native.read_messages(np.asarray(gathered))]


def raise_notices(name, messages):
    """Raises PeerFailedError when a rank sent a notice in place of its payload of parameter
    ``name``; one message a rank.
    """
    failures = [
        f"rank {rank}: {message.notice.decode(errors='replace')}"
        for rank, message in enumerate(messages)
        if message.notice is not None
    ]
    if failures:
        raise PeerFailedError(f"parameter {name}: {'; '.join(failures)}")


class Present(NamedTuple):
    """The ranks whose gradients a reduction adds up: how many, and the sum of each global rank plus
    one.
    """

    ranks: int
    rank_sum: int

    @classmethod
    def of(cls, ranks):
        """Those of a list of global ranks."""
        return cls(len(ranks), sum(ranks) + len(ranks))


def expect_process_set(own, of_horovod):
    """Raises InvalidArgumentError unless Horovod reduces over the compressor's process set, as far
    as the caller says over which it does.

    Ranks that do not take part in Horovod's reduction would be waited for in ours.
    """
    if of_horovod is not None and of_horovod.process_set_id != own.process_set_id:
        # Horovod may be shut down by now, and cannot be asked
        count = f"{len(own.ranks)} " if own.ranks else ""
        raise InvalidArgumentError(
            f"expected Horovod to sum or average over the {count}ranks of the compressor's process set, got another set, "
            f"{of_horovod}; give both the same process_set"
        )


def probe(rank, fingerprint, step):
    """What compress hands to Horovod's reduction, as a list of four numbers that float32 holds.

    Args:
        rank: this rank among all.
        fingerprint: 32 bits of this rank's configuration.
        step: how many gradients of this parameter came before.
    """
    return _native.make_probe(rank, fingerprint, step)


def scale_of(name, reduced, present, fingerprint, step):
    """The factor that Horovod's reduction applies to each rank's gradient: 1/size under Average, 1
    under Sum.

    Args:
        reduced: the probe after Horovod's reduction, four floats.
        present: the ranks that take part, as :class:`Present`.
        fingerprint: of this rank's configuration.
        step: that of this rank's probe.

    Raises:
        InvalidArgumentError: the reduction is not a sum or an average, it runs over other ranks, or
            another rank's compressor is configured differently or at another step.
    """
    try:
        return _native.scale(reduced, *present, fingerprint, step)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"parameter {name}: {error}") from None
