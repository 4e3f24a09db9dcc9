"""Communicators, one per file: how payloads become a sum (docs/communicators.md)."""

from deepreduce_hvd.communicators.allgather import Allgather
from deepreduce_hvd.communicators.auto import Auto
from deepreduce_hvd.communicators.base import Communicator, Transport
from deepreduce_hvd.communicators.cltk import CLTK
from deepreduce_hvd.communicators.gtopk import GTopK
from deepreduce_hvd.communicators.hierarchical import Hierarchical
from deepreduce_hvd.communicators.recursive_doubling import RecursiveDoubling
from deepreduce_hvd.communicators.shared_random_k import SharedRandomK
from deepreduce_hvd.communicators.split_allgather import SplitAllgather

__all__ = [
    "CLTK",
    "Allgather",
    "Auto",
    "Communicator",
    "GTopK",
    "Hierarchical",
    "RecursiveDoubling",
    "SharedRandomK",
    "SplitAllgather",
    "Transport",
]
