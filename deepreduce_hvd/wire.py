"""What travels beside payloads: failure notices, and the probe that rides on Horovod's own allreduce.

A rank that cannot encode its gradient must not leave the others waiting: it sends a notice in the payload's place,
and every rank raises the same error.
"""

import struct

from deepreduce_hvd.errors import CorruptPayload, InvalidArgument, PeerFailed
from deepreduce_hvd.payload import HEADER, MAGIC, NON_FINITE

NOTICE_MAGIC = b"DRER"
_NOTICE = struct.Struct("<4sI")
_LONGEST_MESSAGE = 4096

#: float64 numbers in a probe: one, the rank plus one, the configuration's fingerprint
PROBE_LENGTH = 3


def notice(error):
    """A failure as bytes that take a payload's place."""
    message = f"{type(error).__name__}: {error}".encode()[:_LONGEST_MESSAGE]
    return _NOTICE.pack(NOTICE_MAGIC, len(message)) + message


def split(gathered):
    """Cuts the concatenated messages of all ranks, given as a buffer of bytes, into [(start, end)] by their own lengths."""
    view = memoryview(gathered)
    spans = []
    at = 0
    while at < len(view):
        head = bytes(view[at : at + HEADER.size])
        if head[:4] == NOTICE_MAGIC and len(head) >= _NOTICE.size:
            length = _NOTICE.size + _NOTICE.unpack_from(head)[1]
        elif head[:4] == MAGIC and len(head) == HEADER.size:
            length = HEADER.size + sum(struct.unpack_from("<III", head, 20))
        else:
            raise CorruptPayload(f"gathered message at byte {at}: expected a payload or a notice, got {head[:4].hex(' ')}")
        if at + length > len(view):
            raise CorruptPayload(f"gathered message at byte {at}: expected {length} bytes, got {len(view) - at}")
        spans.append((at, at + length))
        at += length
    return spans


def raise_notices(name, gathered, spans):
    """Raises PeerFailed when a rank sent a notice in place of its payload of parameter ``name``."""
    view = memoryview(gathered)
    failures = [
        f"rank {rank}: {bytes(view[start + _NOTICE.size : end]).decode(errors='replace')}"
        for rank, (start, end) in enumerate(spans)
        if bytes(view[start : start + 4]) == NOTICE_MAGIC
    ]
    if failures:
        raise PeerFailed(f"parameter {name}: {'; '.join(failures)}")


def any_non_finite(gathered, spans):
    """Whether some rank's payload says that its gradient had NaN or Inf."""
    view = memoryview(gathered)
    return any(view[start + 5] & NON_FINITE for start, _ in spans)


def probe(rank, fingerprint):
    """What compress hands to Horovod's reduction, as a list of PROBE_LENGTH numbers."""
    return [1.0, float(rank + 1), float(fingerprint)]


def scale_of(name, reduced, ranks, fingerprint):
    """The factor that Horovod's reduction applies to each rank's gradient: 1/size under Average, 1 under Sum.

    Args:
        reduced: the probe after Horovod's reduction.
        ranks: the global ranks that this compressor exchanges with.
        fingerprint: of this rank's configuration.

    Raises:
        InvalidArgument: the reduction is not a sum or an average, it runs over other ranks, or another rank's
            compressor is configured differently.
    """
    ones, rank_sum, fingerprint_sum = (float(value) for value in reduced)
    scale = ones / len(ranks)
    expected_rank_sum = scale * sum(rank + 1 for rank in ranks)
    if not abs(rank_sum - expected_rank_sum) <= 1e-6 * abs(expected_rank_sum):
        raise InvalidArgument(
            f"parameter {name}: expected DistributedOptimizer to sum or average over the compressor's process set "
            f"(ranks {list(ranks)}), got another operation or another set; give both the same process_set, and op=Average or op=Sum"
        )
    expected_fingerprint_sum = ones * fingerprint
    if not abs(fingerprint_sum - expected_fingerprint_sum) <= 1e-9 * abs(expected_fingerprint_sum) + 1e-9:
        raise InvalidArgument(
            f"parameter {name}: expected the same compressor configuration on every rank, got different ones; codec, memory, "
            f"communicator, seed, dense_below and the named parameters with their shapes must be equal (fingerprint here: {fingerprint:08x})"
        )
    return scale
