"""The adapter for TensorFlow."""

from deepreduce_hvd.tensorflow.ops import allreduce_gradients

__all__ = ["allreduce_gradients"]
