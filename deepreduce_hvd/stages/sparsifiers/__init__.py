"""Sparsifiers, one per file."""

from deepreduce_hvd.stages.sparsifiers.chunk_topk import ChunkTopK
from deepreduce_hvd.stages.sparsifiers.none import NoneSparsifier
from deepreduce_hvd.stages.sparsifiers.random_k import RandomK
from deepreduce_hvd.stages.sparsifiers.threshold import Threshold
from deepreduce_hvd.stages.sparsifiers.topk import TopK

__all__ = ["ChunkTopK", "NoneSparsifier", "RandomK", "Threshold", "TopK"]
