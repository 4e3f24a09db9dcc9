"""Sparsifiers, one file each."""

from deepreduce_hvd.sparsifiers.chunk_topk import ChunkTopK
from deepreduce_hvd.sparsifiers.none import NoneSparsifier
from deepreduce_hvd.sparsifiers.random_k import RandomK
from deepreduce_hvd.sparsifiers.threshold import Threshold
from deepreduce_hvd.sparsifiers.topk import TopK

__all__ = ["ChunkTopK", "NoneSparsifier", "RandomK", "Threshold", "TopK"]
