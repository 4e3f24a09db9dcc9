"""ChunkTopK: keep the largest element of each chunk."""

import numpy as np

from deepreduce_hvd.argument_checks import expect_float, expect_integer
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import Sparsifier


class ChunkTopK(Sparsifier):
    """Sparsifier that keeps the largest-magnitude element of every ``chunk`` consecutive elements.

    If magnitudes are equal, the element with the smaller index is kept. Zeros are never sent. The
    last chunk can be shorter.

    ChunkTopK needs one pass over the data and no threshold. When large values are spread evenly
    over the tensor, it selects about two thirds of the elements that :class:`TopK` selects. Source:
    ScaleCom (Chen et al. 2020, section 3).

    Args:
        ratio: a number in (2^-31, 1]; a shorthand for chunks of round(1 / ratio) elements.
        chunk: the number of elements of a chunk, an integer in [1, 2^31). Give either ``ratio`` or
            ``chunk``.

    Raises:
        InvalidArgumentError: not exactly one of ``ratio`` and ``chunk`` is given, or it is out of
            range.

    >>> ChunkTopK(chunk=3).select(np.array([1, -2, 2, 0, 0, 0, 5], dtype=np.float32), key=0)
    array([1, 6], dtype=uint32)
    """

    stage_id = 4
    example_arguments = "0.01"

    def __init__(self, ratio: float | None = None, chunk: int | None = None) -> None:
        if (ratio is None) == (chunk is None):
            raise InvalidArgumentError(
                f"ChunkTopK: expected one of ratio and chunk, got ratio={ratio!r} and "
                f"chunk={chunk!r}"
            )
        if chunk is None:
            ratio = expect_float(
                "ChunkTopK ratio", ratio, "a number in (2^-31, 1]", lambda r: 2**-31 < r <= 1
            )
        else:
            chunk = expect_integer(
                "ChunkTopK chunk", chunk, "an integer in [1, 2^31)", lambda n: 0 < n < 2**31
            )
        self.ratio = ratio
        self.chunk = chunk

    def parameters(self, step: int = 0) -> tuple[float, ...]:
        if self.ratio is not None:
            return (min(round(1 / self.ratio), 2**31 - 1),)
        assert self.chunk is not None
        return (self.chunk,)

    def select(self, accumulated: np.ndarray, key: int, step: int = 0) -> np.ndarray:
        d = accumulated.size
        chunk = min(int(self.parameters()[0]), max(d, 1))
        magnitudes = np.zeros(-(-d // chunk) * chunk, dtype=np.float32)
        magnitudes[:d] = np.abs(accumulated)
        # argmax returns the first of equal elements
        largest = np.arange(0, magnitudes.size, chunk) + magnitudes.reshape(-1, chunk).argmax(
            axis=1
        )
        return largest[magnitudes[largest] > 0].astype(np.uint32)

    def most_selected(self, d: int, step: int = 0) -> int:
        return -(-d // int(self.parameters()[0]))

    def with_ratio(self, ratio: float) -> "ChunkTopK | None":
        # a subclass may select otherwise
        return None if self.ratio is None or type(self) is not ChunkTopK else ChunkTopK(ratio)
