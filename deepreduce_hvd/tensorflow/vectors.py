"""TensorFlow tensors as the indices and values of sparse vectors."""

import tensorflow as tf

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.tensorflow.exchange import HorovodTransport


def transport(process_set):
    """Return the transport over a process set, which needs eager execution."""
    if not tf.executing_eagerly():
        raise InvalidArgumentError(
            "sparse_allreduce: expected eager execution, got a graph; call it outside of"
            " tf.function or in tf.py_function"
        )
    return HorovodTransport(process_set)


def initialization():
    """Return None: Horovod has no object of TensorFlow that ``hvd.init()`` replaces."""
    return None


def to_numpy(name, tensor):
    """Return the tensor as a NumPy array."""
    return tensor.numpy()


def from_numpy(array, like):
    """Return a new tensor on the device of ``like``."""
    with tf.device(like.device):
        return tf.constant(array)
