"""The adapter for TensorFlow."""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from deepreduce_hvd.tensorflow import elastic as elastic
else:

    def __getattr__(name):
        # not imported with this module, because Horovod's elastic states need Keras 2
        if name == "elastic":
            return importlib.import_module("deepreduce_hvd.tensorflow.elastic")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
