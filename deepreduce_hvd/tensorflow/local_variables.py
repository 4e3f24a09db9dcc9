"""Variables that each rank has for itself, and how they are read and written outside of graphs."""

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from deepreduce_hvd.errors import InvalidArgumentError


def _session():
    session = tf.compat.v1.get_default_session()
    if session is None:
        raise InvalidArgumentError(
            "compressor state: expected eager execution or a default session (`with"
            " session.as_default()`), got neither"
        )
    return session


def read(variable):
    """Return a variable's value as a NumPy array, eagerly or in the default session."""
    if not tf.executing_eagerly():
        return np.array(_session().run(variable))
    # After variable.numpy(), a graph that is being traced would refer to the variable, and could
    # not run once it is deleted. It may be that of a compressor that is not used any more.
    return np.array(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def write(variable, value):
    """Assign a value to a variable, eagerly or in the default session."""
    if tf.executing_eagerly():
        variable.assign(value)
    else:
        variable.load(value, _session())


def local_variable(value, **options):
    """Create a variable of this rank only.

    In a tf.compat.v1 graph it is a local variable, which broadcast_global_variables leaves
    unchanged.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        # tf.Variable would count as made by the tf.function that is being traced, which is an error
        # after its first call, and a SavedModel may have been that
        return ResourceVariable(value, trainable=False, **options)
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(
        value, trainable=False, collections=local, use_resource=True, **options
    )
