"""Value codecs, one file each."""

from deepreduce_hvd.value.raw_value import RawValue

__all__ = ["RawValue"]
