"""Index codecs, one file each."""

from deepreduce_hvd.index.raw_index import RawIndex
from deepreduce_hvd.index.rice import Rice

__all__ = ["RawIndex", "Rice"]
