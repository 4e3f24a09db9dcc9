"""Buckets: which gradients share a message."""


def assign(sizes, bucket_bytes):
    """Cuts tensors of ``sizes`` elements (of float32), in the order in which they become ready, into buckets.

    A bucket is closed once it holds ``bucket_bytes``; 0 gives every tensor one of its own. Returns lists of positions in ``sizes``.
    """
    buckets, filled = [], 0
    for position, size in enumerate(sizes):
        if not buckets or filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(position)
        filled += 4 * size
    return buckets
