"""Inputs of operators: ranks, which may change after tracing, constants, and the time.

Also where a gradient of a graph comes from.
"""

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.saved_model import save_context

from deepreduce_hvd.coordination.launchers import is_elastic
from deepreduce_hvd.errors import InvalidArgumentError

#: operators that may stand between slices and the gradient that Horovod reduces
_ELEMENT_WISE = "Cast", "Identity", "Mul", "RealDiv", "Reshape"


def is_exported():
    """Return whether a function is traced for a SavedModel, which one rank may save alone."""
    return save_context.in_save_context()


def rank_of_job():
    """Return the global rank, or in elastic training an operator that returns it."""
    return hvd.rank_op() if is_elastic() else hvd.rank()


def size_of(process_set):
    """Return the size of a process set, or in elastic training an operator that returns it."""
    return hvd.size_op(process_set.process_set_id) if is_elastic() else process_set.size()


def ranks_of(process_set):
    """Return the global ranks of a process set; an empty list stands for all ranks."""
    return (
        []
        if process_set.ranks is None or process_set.process_set_id == 0
        else list(process_set.ranks)
    )


def stack(parts, dtype):
    """Return Python numbers, or tensors among them, as one tensor."""
    if any(tf.is_tensor(part) for part in parts):
        return tf.stack([tf.cast(part, dtype) for part in parts])
    return tf.constant(parts, dtype)


def position_of(compressor, slot, step):
    """Return seed, step, key and rank, which key an operator's random choices, (4,) int64."""
    return stack([compressor.seed, step, slot.key, rank_of_job()], tf.int64)


def time_after(tensor):
    """Return the time in seconds, read once a tensor is there."""
    with tf.control_dependencies([tensor]):
        return tf.timestamp()


def after(updates):
    """Return a context whose operators run after updates of variables."""
    return tf.control_dependencies([update for update in updates if tf.is_tensor(update)])


def without_derivative(result, gradient):
    """Return the result of reducing a gradient, so that its derivative is an error.

    TensorFlow would count a result of Python code, and a decoded one, as a constant.
    """

    @tf.custom_gradient
    def reduced(result, gradient):
        return tf.identity(result), _refuse_derivative

    return reduced(result, gradient)


@tf.RegisterGradient("DeepreduceDecodeSum")
def _refuse_derivative(*arguments):
    raise InvalidArgumentError(
        "GradientTape: expected no derivative of a gradient that a compressor reduced, got one;"
        " derive gradients before they are reduced, and reduce them outside of other tapes"
    )


def is_in_xla():
    """Return whether this is in a function that XLA compiles."""
    from tensorflow.python.ops import control_flow_util

    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def refuse_xla():
    """Raise InvalidArgumentError in a function that XLA compiles."""
    if is_in_xla():
        raise InvalidArgumentError(
            "compress: expected a function without XLA, got one with jit_compile=True; payload"
            " sizes are not known when XLA compiles"
        )


def is_from_slices(gradient):
    """Return whether a gradient, as Horovod passes it, is a tensor that a graph made from slices.

    The graph that made it is looked at. A branch in which it is used has a placeholder for it, and
    reading what placeholders stand for would keep tensors and graphs alive.
    """
    while hasattr(gradient, "op"):  # an eager tensor has none
        made_by = gradient.op
        if made_by.type not in _ELEMENT_WISE:
            return made_by.type == "UnsortedSegmentSum"
        # not a factor, which may be the first operand
        gradient = max(made_by.inputs, key=lambda one: one.shape.rank or 0)
    return False
