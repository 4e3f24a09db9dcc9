"""Sparsifiers, one file each."""

from deepreduce_hvd.sparsifiers.none import NoneSparsifier
from deepreduce_hvd.sparsifiers.topk import TopK

__all__ = ["NoneSparsifier", "TopK"]
