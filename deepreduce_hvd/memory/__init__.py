"""Memories: what becomes of the part of a gradient that was not sent, one file each."""

from deepreduce_hvd.memory.low_pass import LowPass
from deepreduce_hvd.memory.momentum_correction import MomentumCorrection
from deepreduce_hvd.memory.none import NoMemory
from deepreduce_hvd.memory.residual import Residual

__all__ = ["LowPass", "MomentumCorrection", "NoMemory", "Residual"]
