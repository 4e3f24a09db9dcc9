"""RandomK: k random elements, the same on every rank."""

import numpy as np

from deepreduce_hvd.numerics.random import mix64, random32
from deepreduce_hvd.stages.base import Sparsifier
from deepreduce_hvd.stages.sparsifiers.amount import check_amount, kept_count

_ROUNDS = 8


def permuted(key, d, numbers):
    """Where a keyed permutation of [0, d) takes ``numbers`` (k,) uint32 below ``d``, as (k,)
    uint32.

    An alternating Feistel network permutes the smallest power of two that holds ``d``, and at least
    2^8, since it mixes fewer bits badly; what falls outside is permuted again until it falls inside
    ("cycle walking", Black and Rogaway 2002).
    """
    bits = max((d - 1).bit_length(), 8)
    low_bits = np.uint32(bits - bits // 2)
    low_mask, high_mask = np.uint32((1 << int(low_bits)) - 1), np.uint32((1 << bits // 2) - 1)
    keys = [mix64(key ^ number) for number in range(_ROUNDS)]
    result = np.array(numbers, dtype=np.uint32)
    outside = np.arange(result.size)
    while outside.size:
        low, high = result[outside] & low_mask, result[outside] >> low_bits
        for number in range(0, _ROUNDS, 2):
            low ^= random32(keys[number], high) & low_mask
            high ^= random32(keys[number + 1], low) & high_mask
        result[outside] = high << low_bits | low
        outside = outside[result[outside] >= d]
    return result


class RandomK(Sparsifier):
    """``k`` distinct random elements, zeros too, chosen anew at every step without a look at the
    data (Stich et al. 2018).

    The key is the same on all ranks, so all send the same positions (DeepReduce's Random-r).
    ``ratio`` in (0, 1] keeps max(1, floor(ratio * d)) elements; ``k`` keeps that many. Values are
    not scaled up: with error feedback they must not be.

    >>> RandomK(k=3).select(np.zeros(10, dtype=np.float32), key=1).size
    3
    """

    stage_id = 2

    def __init__(self, ratio: float | None = None, k: int | None = None) -> None:
        check_amount("RandomK", ratio, k)
        self.ratio = ratio
        self.k = k

    def parameters(self, step=0):
        return (self.ratio or 0.0, self.k or 0)

    def select(self, accumulated, key, step=0):
        d = accumulated.size
        return np.sort(
            permuted(key, d, np.arange(kept_count(self.parameters(), d), dtype=np.uint32))
        )

    def most_selected(self, d, step=0):
        return kept_count(self.parameters(step), d) if d else 0
