"""The compressor after ``close``, on TensorFlow."""

from deepreduce_hvd.adapters.base_adapter import ClosedAdapter
from deepreduce_hvd.tensorflow.graph import is_exported


class ClosedTensorFlowAdapter(ClosedAdapter):
    """Refuses every use, except in a graph that is traced for a SavedModel.

    Horovod's optimizer traces the reduction again when a model is saved, and nobody trains with
    that graph.
    """

    def compress(self, tensor, slots=None):
        if not is_exported():
            self.refuse()
        return tensor, None

    def decompress(self, tensor, pending):
        if not is_exported():
            self.refuse()
        return tensor
