"""TensorFlow tensors as the indices and values of sparse vectors."""

import tensorflow as tf

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.exchange import HorovodTransport

__all__ = ["HorovodTransport", "from_numpy", "to_numpy"]


def to_numpy(name, tensor):
    """Return the tensor as a NumPy array; ``name`` is that of the argument."""
    if not tf.executing_eagerly():
        raise InvalidArgumentError(
            f"{name}: expected an eager tensor, got one of a graph; call this outside of tf.function or in tf.py_function"
        )
    return tensor.numpy()


def from_numpy(array, like):
    """Return a new tensor on the device of ``like``."""
    with tf.device(like.device):
        return tf.constant(array)
