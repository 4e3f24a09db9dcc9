"""Recursive doubling: which ranks meet in ceil(log2 P) rounds, for any number of ranks."""

from typing import Any

import numpy as np

from deepreduce_hvd.communicators import wire
from deepreduce_hvd.communicators.common_indices import notices_of
from deepreduce_hvd.communicators.sparse_sum import failed, merged
from deepreduce_hvd.communicators.sums import CompleteSum

_NOTHING = np.zeros(0, dtype=np.uint8)


def folded(size):
    """Return (largest power of two that is at most ``size``, number of ranks beyond it)."""
    power = 1 << (size.bit_length() - 1)
    return power, size - power


def send(channel, message, to):
    """Start an alltoall in which this rank sends ``message`` only to rank ``to``.

    If ``to`` is None, this rank sends nothing. No rank receives more than one message.
    """
    parts = [_NOTHING] * channel.size
    if to is not None:
        parts[to] = message
    return channel.alltoall(parts, senders=1)


def _trimmed(bucket, total, trim, rank, keeps):
    """Return the part of a sum that ``trim`` keeps.

    If ``keeps`` is True, the part that ``trim`` drops goes to the memory of this rank.
    """
    if not total.valid:
        return total
    try:
        total, dropped = trim(total)
        if keeps:
            bucket.put_back(dropped.indices, dropped.values)
    except Exception as error:  # tell the other ranks, or they would wait
        return failed(rank, error)
    return total


def butterfly(bucket, channel, trim):
    """Return the sum by recursive doubling; a generator.

    Let p be the largest power of two that is at most the number of ranks. Each rank r >= p first
    sends its part to rank r - p, and receives the sum at the end. After a round of distance n, all
    ranks of a block of 2n ranks hold the same partial sum: they decode the messages of both halves
    and add them, the lower half first.

    The lowest rank of a block is responsible for the block: its memory takes what encoding loses
    and what ``trim`` drops, once. A last round tells all ranks about failures that only the
    receiver of a message has seen. Two ranks need no such round: they exchange their messages in
    one allgather, so both read both.

    Args:
        bucket: the bucket of this rank.
        channel: the channel of the exchange.
        trim: a function from a sum to (the part to keep, the part to drop).
    """
    rank = channel.rank
    power, beyond = folded(channel.size)
    partial = bucket.select()
    stage = 0

    def combine(low, high, lowest):
        total = merged([low, high], bucket.d, rank).without_zeros()
        return _trimmed(bucket, total, trim, rank, keeps=rank == lowest)

    if channel.size == 2:
        gathered = yield channel.allgather(bucket.code(partial, 1, rank))
        try:
            low, high = np.split(gathered, wire.split(gathered, 2).bounds[1:-1])
        except Exception as error:
            return CompleteSum(bucket, failed(rank, error))
        return CompleteSum(bucket, combine(low, high, 0))
    if beyond:
        if rank >= power or rank < beyond:
            message = bucket.code(partial, stage, rank)
        if rank >= power:
            yield send(channel, message, rank - power)
        else:
            received = yield send(channel, None, None)
            if rank < beyond:
                partial = combine(message, received[rank + power], rank)
    distance = 1
    while distance < power:
        stage += 1
        if rank < power:
            partner, block = rank ^ distance, rank & -distance
            message = bucket.code(partial, stage, block, keep=rank == block)
            received = yield send(channel, message, partner)
            low, high = (
                (message, received[partner]) if rank < partner else (received[partner], message)
            )
            partial = combine(low, high, rank & -(2 * distance))
        else:
            yield send(channel, None, None)
        distance *= 2
    if beyond:
        # all ranks encode the same sum in the same way and use the decoded result
        own: Any = None if rank >= power else bucket.code(partial, stage + 1, 0, keep=rank == 0)
        received = yield send(channel, own, rank + power if rank < beyond else None)
        partial = merged([own if rank < power else received[rank - power]], bucket.d, rank)
    if channel.size > 1:
        notices = yield channel.allgather(notices_of(partial))
        if notices.size:
            partial = merged([notices], bucket.d, rank)
    return CompleteSum(bucket, partial)


def tree(bucket, channel, trim):
    """Return the same sum by a reduction along a binomial tree and a broadcast; a generator.

    The arguments are those of :func:`butterfly`.
    """
    rank = channel.rank
    power, beyond = folded(channel.size)
    partial = bucket.select()
    stage = 0
    for distance in ([power] if beyond else []) + [
        1 << level for level in range(power.bit_length() - 1)
    ]:
        if distance == power:
            sends, receives = rank >= power, rank < beyond
        else:
            stage += 1
            sends, receives = (
                rank < power and rank % (2 * distance) == phase for phase in (distance, 0)
            )
        message: Any = bucket.code(partial, stage, rank) if sends or receives else None
        received = yield send(channel, message, rank - distance if sends else None)
        if receives:
            partial = merged([message, received[rank + distance]], bucket.d, rank).without_zeros()
            partial = _trimmed(bucket, partial, trim, rank, keeps=True)
    message = yield channel.broadcast(bucket.code(partial, stage + 1, 0) if rank == 0 else None, 0)
    return CompleteSum(bucket, merged([message], bucket.d, rank))
