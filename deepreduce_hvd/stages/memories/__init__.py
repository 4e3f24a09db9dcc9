"""Memories, one per file: they keep the part of a gradient that was not sent."""

from deepreduce_hvd.stages.memories.low_pass import LowPass
from deepreduce_hvd.stages.memories.momentum_correction import MomentumCorrection
from deepreduce_hvd.stages.memories.none import NoMemory
from deepreduce_hvd.stages.memories.residual import Residual

__all__ = ["LowPass", "MomentumCorrection", "NoMemory", "Residual"]
