"""The name that :mod:`deepreduce_hvd.tensorflow.elastic` had before."""

from deepreduce_hvd.tensorflow.elastic import TensorFlowKerasState

__all__ = ["TensorFlowKerasState"]
