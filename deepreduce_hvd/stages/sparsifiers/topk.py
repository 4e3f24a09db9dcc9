"""TopK: keep the k elements of largest magnitude."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_float, expect_integer
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numerics.exact_decay import exact_decay
from deepreduce_hvd.stages.base import Sparsifier
from deepreduce_hvd.stages.sparsifiers.amount import expect_amount, kept_count

#: ratio of the first step of a warm-up, by default
_WARMUP_RATIO = 0.25


class TopK(Sparsifier):
    """Sparsifier that keeps the ``k`` elements of largest magnitude (Aji and Heafield 2017).

    The selection is exact. If magnitudes are equal, the element with the smaller index is kept.
    Zeros are never sent.

    Args:
        ratio: keep max(1, floor(ratio * d)) elements (Top-r in DeepReduce); a number in (0, 1].
        k: keep this number of elements. Give either ``ratio`` or ``k``.
        warmup_steps: the number of steps in which the ratio falls exponentially from
            ``warmup_ratio`` to ``ratio``, as in the first epochs of Deep Gradient Compression (Lin
            et al. 2018, section 3.3). It requires ``ratio``.
        warmup_ratio: the ratio of the first step of a warm-up; a number in (0, 1], and at least
            ``ratio``. Default: 0.25, or ``ratio`` if that is larger, so that a warm-up never sends
            less than the steps after it.

    Raises:
        InvalidArgumentError: not exactly one of ``ratio`` and ``k`` is given, an argument is out of
            range, ``warmup_steps`` is given together with ``k``, or a warm-up has a
            ``warmup_ratio`` below ``ratio``.

    >>> TopK(k=2).select(np.array([1, -3, 0, 3, 2], dtype=np.float32), key=0)
    array([1, 3], dtype=uint32)
    >>> TopK(0.01, warmup_steps=2).parameters(step=1)[0]
    0.05
    """

    stage_id = 1
    example_arguments = "0.01"

    def __init__(
        self,
        ratio: float | None = None,
        k: int | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float | None = None,
    ) -> None:
        self.ratio, self.k = expect_amount("TopK", ratio, k)
        self.warmup_steps = expect_integer(
            "TopK warmup_steps", warmup_steps, "an integer of at least 0", lambda steps: steps >= 0
        )
        if self.warmup_steps and self.ratio is None:
            raise InvalidArgumentError(
                f"TopK warmup_steps: expected 0 with a fixed k, got {warmup_steps}"
            )
        # without a warm-up, the ratio of its first step has no effect
        least = self.ratio if self.warmup_steps and self.ratio is not None else 0.0
        self.warmup_ratio = expect_float(
            "TopK warmup_ratio",
            max(_WARMUP_RATIO, least) if warmup_ratio is None else warmup_ratio,
            "a number in (0, 1]",
            lambda ratio: 0 < ratio <= 1,
        )
        if self.warmup_ratio < least:
            raise InvalidArgumentError(
                f"TopK warmup_ratio: expected at least the ratio {least:g}, to which it falls, got"
                f" {self.warmup_ratio:g}"
            )

    @property
    def schedule_steps(self) -> int:  # type: ignore[override]  # follows the setting, read-only
        """The number of steps in which the density changes."""
        return self.warmup_steps

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        if self.ratio is not None and step < self.warmup_steps:
            # ranks on different machines must get the same number
            return exact_decay(self.warmup_ratio, self.ratio, int(step), self.warmup_steps), 0
        return (self.ratio or 0.0, self.k or 0)

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        k = kept_count(self.parameters(step), accumulated.size)
        candidates = np.flatnonzero(accumulated)
        # a stable sort puts the smaller index first when magnitudes are equal
        largest = np.argsort(-np.abs(accumulated[candidates]), kind="stable")[:k]
        return np.sort(candidates[largest]).astype(np.uint32)

    def most_selected(self, d: int, step: int = 0) -> int:
        return kept_count(self.parameters(step), d) if d else 0

    def with_ratio(self, ratio: float) -> "TopK | None":
        return (
            None
            if self.ratio is None or type(self) is not TopK  # a subclass may select otherwise
            else TopK(
                ratio, warmup_steps=self.warmup_steps, warmup_ratio=max(self.warmup_ratio, ratio)
            )
        )
