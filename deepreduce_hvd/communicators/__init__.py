"""Communicators: how the payloads of all ranks meet, one file each."""

from deepreduce_hvd.communicators.allgather import Allgather
from deepreduce_hvd.communicators.base import Communicator, Transport

__all__ = ["Allgather", "Communicator", "Transport"]
