"""Send memories from rank to rank: copies of them for elastic training, or the memories themselves.

All functions that take a transport are collective: all ranks call them at once. Every rank has the
same parameters, so memories have the same size on all ranks.
"""

import numpy as np

from deepreduce_hvd.checkpoints.checkpoint import memory_factor
from deepreduce_hvd.coordination.commits import gather_numbers
from deepreduce_hvd.errors import CorruptPayloadError
from deepreduce_hvd.stages.memories.saturated import saturated_mean

#: bytes of a memory per collective; Horovod's lengths have 31 bits
_PART_BYTES = 1 << 30


def distance_of_copies(transport):
    """Return how many ranks further the copy of each memory goes, the same on all ranks.

    Raises:
        CorruptPayloadError: a rank sent something else than the number of ranks on its host.
    """
    own = np.array([transport.local_size], dtype=np.int64)
    local_sizes = [count for (count,) in gather_numbers(transport, own, "hosts")]
    if not all(1 <= count <= transport.size for count in local_sizes):
        raise CorruptPayloadError(
            f"elastic training: expected from every rank the number of ranks on its host, 1 to "
            f"{transport.size}, got {local_sizes}"
        )
    return distance_between_hosts(local_sizes)


def distance_between_hosts(local_sizes):
    """Return the smallest distance at which the fewest ranks have their copy on their own host.

    Horovod numbers ranks host by host. So this distance is the number of ranks on the largest host.
    If the other hosts have fewer ranks in all, it is the number of those. With one host it is 1.

    Args:
        local_sizes: for every rank, the number of ranks on its host.
    """
    largest = max(local_sizes)
    return min(largest, len(local_sizes) - largest) or 1


def copy_of_other_rank(slots, transport, distance):
    """Send this rank's memory to the rank ``distance`` further.

    Returns:
        The memory of the rank ``distance`` before, (n,) float32.
    """
    own = _flat(slots)
    after = (transport.rank + distance) % transport.size
    before = (transport.rank - distance) % transport.size
    copy = np.empty_like(own)
    for start, received in _send(own, after, [before], transport, "copies"):
        copy[start : start + received[before].size] = received[before]
    return copy.view(np.float32)


def hand_over(slots, transport, keepers):
    """Move each memory to the rank that now sends on its behalf.

    A hierarchical communicator sends from the first rank of a host, and that rank may change when
    ranks have left.

    Args:
        slots: list of this rank's slots.
        transport: transport over all ranks.
        keepers: for every rank, the rank whose memory stores its residual.
    """
    if keepers == list(range(transport.size)):
        return
    own = _flat(slots)
    keeper = keepers[transport.rank]
    hands_over = keeper != transport.rank and bool(own.any())
    flags = transport.wait(
        transport.allgather(np.array([hands_over], dtype=np.uint8), "deepreduce.elastic.keepers")
    )
    if flags.size != transport.size or flags.max() > 1:
        raise CorruptPayloadError(
            f"elastic training: expected a flag of 0 or 1 from each of {transport.size} "
            f"ranks, got {flags}"
        )
    if not flags.any():
        return
    senders = [rank for rank, flag in enumerate(flags) if flag and keepers[rank] == transport.rank]
    total = np.zeros(own.size // 4, dtype=np.float32)
    for start, received in _send(own, keeper if hands_over else None, senders, transport, "handed"):
        for rank in senders:
            part = np.array(received[rank]).view(np.float32)
            total[start // 4 : start // 4 + part.size] += part
    if hands_over:
        clear(slots)
    if senders:
        add(slots, total)


def add(slots, copy):
    """Add a copy of another rank's memory, (n,) float32, to the slots."""
    start = 0
    for slot in slots:
        memory = {}
        for kind, part in slot.memory().items():
            array = np.asarray(part)
            memory[kind] = array + copy[start : start + array.size].reshape(array.shape)
            start += array.size
        slot.set_memory(memory)


def rescale(slots, old_size, new_size):
    """Adapt the memories to another number of ranks, so that the update in them stays the same."""
    for slot in slots:
        ratio = memory_factor(slot.reduction, old_size, new_size)
        if ratio != 1:
            memory = slot.memory().items()
            slot.set_memory(
                {kind: saturated_mean([np.asarray(part)], ratio) for kind, part in memory}
            )


def clear(slots):
    """Set the memory of the slots to zeros."""
    for slot in slots:
        memory = {kind: np.zeros(part.shape, np.float32) for kind, part in slot.memory().items()}
        slot.set_memory(memory)


def _flat(slots):
    """Return this rank's memory as (n,) uint8."""
    parts = [np.asarray(part).reshape(-1) for slot in slots for part in slot.memory().values()]
    return np.concatenate(parts).view(np.uint8) if parts else np.zeros(0, dtype=np.uint8)


def _send(own, receiver, senders, transport, what):
    """Send ``own`` to a rank, in parts; a generator.

    Args:
        own: (n,) uint8, of equal size on all ranks.
        receiver: rank that gets it; None for none.
        senders: ranks that send to this one; each must send parts of the same sizes.
        transport: transport over all ranks.
        what: text for the names of the collectives.

    Yields:
        The start of a part in bytes, and the list of the parts received from every rank.
    """
    for start in range(0, own.size, _PART_BYTES):
        sent = own[start : start + _PART_BYTES]
        parts = [sent if rank == receiver else sent[:0] for rank in range(transport.size)]
        received = transport.wait(transport.alltoall(parts, f"deepreduce.elastic.{what}.{start}"))
        for rank in senders:
            if received[rank].size != sent.size:
                raise CorruptPayloadError(
                    f"elastic training: expected {sent.size} bytes of memory from rank "
                    f"{rank}, got {received[rank].size}"
                )
        yield start, received
