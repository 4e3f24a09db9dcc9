"""The former name of :mod:`deepreduce_hvd.tensorflow.elastic`, kept for compatibility."""

from deepreduce_hvd.tensorflow.elastic import TensorFlowKerasState

__all__ = ["TensorFlowKerasState"]
