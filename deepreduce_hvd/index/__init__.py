"""Index codecs, one file each."""

from deepreduce_hvd.index.raw_index import RawIndex

__all__ = ["RawIndex"]
