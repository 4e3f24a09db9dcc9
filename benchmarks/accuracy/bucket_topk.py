"""The selection of SparCML: the largest elements of each bucket of consecutive elements."""

import numpy as np

import deepreduce_hvd as dr


class BucketTopK(dr.Sparsifier):
    """Sparsifier that keeps the ``k`` elements of largest magnitude of every bucket.

    If magnitudes are equal, the element with the smaller index is kept. Zeros are never sent. The
    last bucket can be shorter. Source: SparCML (Renggli et al. 2019).

    Args:
        ratio: keep max(1, floor(ratio * bucket)) elements of each bucket; a number in (0, 1].
        bucket: the number of elements of a bucket.
        warmup_steps: the number of steps in which the ratio falls from 0.25 to ``ratio``, as in
            :class:`~deepreduce_hvd.TopK`.
    """

    def __init__(self, ratio, bucket=512, warmup_steps=0):
        self.bucket = bucket
        self.schedule_steps = warmup_steps
        self._ratios = dr.TopK(ratio, warmup_steps=warmup_steps)

    def _count(self, step):
        """Return how many elements of a bucket are kept."""
        return self._ratios.most_selected(self.bucket, step)

    def select(self, accumulated, key, step=0):
        d = accumulated.size
        magnitudes = np.zeros(-(-d // self.bucket) * self.bucket, dtype=np.float32)
        magnitudes[:d] = np.abs(accumulated)
        # a stable sort puts the smaller index first when magnitudes are equal
        order = np.argsort(-magnitudes.reshape(-1, self.bucket), axis=1, kind="stable")
        starts = np.arange(0, magnitudes.size, self.bucket)[:, None]
        largest = np.sort((starts + order[:, : self._count(step)]).ravel())
        return largest[magnitudes[largest] > 0].astype(np.uint32)

    def most_selected(self, d, step=0):
        whole, rest = divmod(d, self.bucket)
        return whole * self._count(step) + min(rest, self._count(step))
