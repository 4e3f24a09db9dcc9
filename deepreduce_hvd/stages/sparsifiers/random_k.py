"""RandomK: keep k random elements, the same on every rank."""

import numpy as np

from deepreduce_hvd.numerics.random import mix64, random32
from deepreduce_hvd.stages.base import Sparsifier
from deepreduce_hvd.stages.sparsifiers.amount import expect_amount, kept_count

_ROUNDS = 8


def permuted(key, d, numbers):
    """Apply a keyed permutation of [0, d) to ``numbers``.

    An alternating Feistel network permutes the range [0, 2^b), where 2^b is the smallest power of
    two that is at least ``d``. At least 8 bits are used, because the network mixes fewer bits
    badly. A result outside [0, d) is permuted again until it is inside ("cycle walking", Black and
    Rogaway 2002).

    Args:
        key: the 64-bit key of the permutation.
        d: the size of the range.
        numbers: (k,) uint32, less than ``d``.

    Returns:
        (k,) uint32, less than ``d``.
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
    """Sparsifier that keeps ``k`` distinct random elements, including zeros.

    The elements are drawn again at every step, independently of the data (Stich et al. 2018). The
    key is equal on all ranks, so all ranks send the same positions (Random-r in DeepReduce). Values
    are not scaled up, because error feedback requires unscaled values.

    Args:
        ratio: keep max(1, floor(ratio * d)) elements; a number in (0, 1].
        k: keep this number of elements. Give either ``ratio`` or ``k``.

    Raises:
        InvalidArgumentError: not exactly one of ``ratio`` and ``k`` is given, or it is out of
            range.

    >>> RandomK(k=3).select(np.zeros(10, dtype=np.float32), key=1).size
    3
    """

    stage_id = 2
    example_arguments = "0.01"

    def __init__(self, ratio: float | None = None, k: int | None = None) -> None:
        self.ratio, self.k = expect_amount("RandomK", ratio, k)

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        return (self.ratio or 0.0, self.k or 0)

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        d = accumulated.size
        return np.sort(
            permuted(key, d, np.arange(kept_count(self.parameters(), d), dtype=np.uint32))
        )

    def most_selected(self, d: int, step: int = 0) -> int:
        return kept_count(self.parameters(step), d) if d else 0

    def with_ratio(self, ratio: float) -> "RandomK | None":
        # a subclass may select otherwise
        return None if self.ratio is None or type(self) is not RandomK else RandomK(ratio)
