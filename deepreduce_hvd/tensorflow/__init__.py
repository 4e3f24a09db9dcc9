"""The adapter for TensorFlow."""

from deepreduce_hvd.tensorflow import ops
from deepreduce_hvd.tensorflow.groups import message_groups
from deepreduce_hvd.tensorflow.ops import allreduce_gradients
from deepreduce_hvd.tensorflow.scheduled import schedule_callback, scheduled

__all__ = [
    "allreduce_gradients", "cuda_supports", "message_groups", "schedule_callback", "scheduled"
]  # fmt: skip

#: A function of the 20 numbers of :meth:`Codec.fields`. It returns True if this build supports the
#: codec and the memory on a GPU, otherwise False. It is None in a build without CUDA kernels.
cuda_supports = ops.cuda_supports
