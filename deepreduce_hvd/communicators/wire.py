"""Messages other than payloads: notices of failures and probes.

A rank that cannot encode its gradient must not leave the other ranks waiting. It sends a notice in
place of the payload, and every rank raises the same error. A probe is sent through Horovod's own
allreduce. The native core reads and writes the bytes of both (csrc/container/wire.cc).
"""

import numpy as np

from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError, PeerFailedError
from deepreduce_hvd.native import core as _native

AVERAGE, SUM = "average", "sum"
#: What Horovod's reduction does; None if it is not known yet.
REDUCTIONS = (None, AVERAGE, SUM)

#: How many float32 numbers a probe has, and its size in bytes.
PROBE_NUMBERS = _native.probe_length
PROBE_BYTES = 4 * PROBE_NUMBERS


class Messages:
    """Messages of all ranks, one after another, as an allgather returns them.

    Args:
        bounds: (n + 1,) int64. Message i has the bytes from ``bounds[i]`` to ``bounds[i + 1]``.
        non_finite: (n,) bool, whether each message is a non-finite payload.
        notices: {number of a message: its text} of those that are notices.
    """

    def __init__(self, bounds, non_finite, notices):
        self.bounds = bounds
        self.non_finite = non_finite
        self.notices = notices

    def __len__(self):
        return len(self.non_finite)

    def failures(self):
        """Return the texts of all notices, each once, separated by semicolons."""
        texts = (text.decode(errors="replace") for text in self.notices.values())
        return "; ".join(dict.fromkeys(texts))


def describe(error):
    """Return the type and the text of an error.

    This works for any error, even if its text cannot be created. Otherwise the other ranks would
    not receive a notice.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be read"


def notice(error):
    """Return an error as a notice, (n,) uint8, to send in place of a payload."""
    return write_notice(describe(error))


def write_notice(text):
    """Return a text as a notice, (n,) uint8.

    Characters that UTF-8 cannot encode, such as half of a surrogate pair, are escaped.
    """
    return _native.write_notice(text.encode(errors="backslashreplace"))


def size_notice(size, senders, most, rank):
    """Return the notice of messages that are too large for a collective, (n,) uint8.

    Args:
        size: the number of bytes of the messages.
        senders: the number of ranks that may send as much to the same rank.
        most: the most bytes that a rank can receive.
        rank: the global number of the rank that sends the messages.
    """
    return _native.size_notice(size, senders, most, rank)


def refusal_of(messages, refusal):
    """Return notices to send in place of messages: all ranks raise the error, and none waits.

    Args:
        messages: (n,) uint8, one or more messages one after another.
        refusal: the notice that says why they cannot be sent.
    """
    return np.concatenate([refusal] * len(split(messages)))


def split(gathered, count=None, of_each=0):
    """Split the concatenated messages of all ranks.

    Args:
        gathered: (n,) uint8.
        count: the number of messages. None allows any number.
        of_each: the number of messages of each rank, so that an error can name the rank. 0 if they
            are not in the order of the ranks.

    Returns:
        The :class:`Messages`.

    Raises:
        CorruptPayloadError: the bytes are not a sequence of ``count`` messages.
    """
    bounds, non_finite, notices = _native.read_messages(np.asarray(gathered), of_each)
    if count not in (None, len(non_finite)):
        raise CorruptPayloadError(f"expected {count} messages, got {len(non_finite)}")
    return Messages(bounds, non_finite, dict(notices))


def raise_notices(name, messages, number=0, count=1):
    """Raise PeerFailedError if a rank sent a notice in place of a payload.

    Args:
        name: the name of the parameter.
        messages: the :class:`Messages`, ``count`` of each rank.
        number: which message of each rank belongs to the parameter.
        count: the number of messages of each rank.
    """
    failures = [
        f"rank {place // count}: {text.decode(errors='replace')}"
        for place, text in messages.notices.items()
        if place % count == number
    ]
    if failures:
        raise PeerFailedError(f"parameter {name}: {'; '.join(failures)}")


def expect_process_set(own, of_horovod):
    """Raise InvalidArgumentError if Horovod reduces over another process set than the compressor.

    Otherwise the compressor would wait for ranks that do not take part in Horovod's reduction.
    Nothing is checked if Horovod's process set is not known (None).
    """
    if of_horovod is not None and of_horovod.process_set_id != own.process_set_id:
        # Horovod may be shut down by now, so use the ranks stored in the process set
        count = f"{len(own.ranks)} " if own.ranks else ""
        raise InvalidArgumentError(
            f"expected Horovod to sum or average over the {count}ranks of the "
            "compressor's process set, got another set, "
            f"{of_horovod}; give both the same process_set"
        )


def probe(rank, fingerprint, step, loss_scale=None):
    """Return the first four numbers of the probe that ``compress`` gives to Horovod's reduction.

    Two more follow for a parameter that may be an embedding table.

    Args:
        rank: the global rank.
        fingerprint: 32 bits of this rank's configuration.
        step: the number of earlier gradients of this parameter.
        loss_scale: the loss scale of the step, or None.
    """
    return _native.make_probe(rank, fingerprint, step, loss_scale or 0.0)


def scale_of(name, reduced, ranks, fingerprint, step, loss_scale=None):
    """Return the factor that Horovod's reduction applies to the gradient of each rank.

    The factor is 1/size with Average and 1 with Sum.

    Args:
        name: the name of the parameter.
        reduced: the probe after Horovod's reduction, its first four numbers.
        ranks: the global numbers of the ranks that take part.
        fingerprint: 32 bits of this rank's configuration.
        step, loss_scale: those of this rank's probe.

    Raises:
        InvalidArgumentError: the reduction is not a sum or an average, it includes other ranks, or
            the compressor of another rank has another configuration, step or loss scale.
    """
    try:
        return _native.scale(reduced, ranks, fingerprint, step, loss_scale or 0.0)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"parameter {name}: {error}") from None


def reduction_of(scale, size):
    """Return :data:`AVERAGE` or :data:`SUM`, from the factor of a reduction over ``size`` ranks.

    An average divides by the number of ranks. Any other factor does not depend on this number, so
    it belongs to a sum. With one rank, None is returned: there both have the factor 1.
    """
    if size == 1:
        return None
    # the factor is read from a probe, which may be rounded to float16
    return AVERAGE if abs(scale * size - 1) < 0.1 else SUM
