"""Gradients between compress and decompress, and the messages that they share."""

import tensorflow as tf


class GradientGroup:
    """The gradients of one message.

    They are all gradients that Horovod compresses before it decompresses the first of them.

    Args:
        graph: the graph that is traced, or None in eager execution.
        exchange: a :class:`~deepreduce_hvd.tensorflow.exchange.GroupExchange`; None with Allgather.
    """

    def __init__(self, graph, exchange):
        self.graph = graph
        self.payloads = []
        self.slots = []
        self.gathered = None
        self.lengths = None  # lengths of the gathered messages, if a GPU decodes some
        self.exchange = exchange

    @property
    def message(self):
        """The payloads one after another."""
        return self.payloads[0] if len(self.payloads) == 1 else tf.concat(self.payloads, 0)


class Pending:
    """One gradient between compress and decompress.

    Args:
        slot: slot of its variable.
        tensor: the gradient.
        group: the :class:`GradientGroup` of its message, or None if it is not compressed.
        member: its number in the group.
        step: value of the slot's step counter before this step.
    """

    def __init__(self, slot, tensor, group, member, step=None):
        self.slot = slot
        self.step = step
        self.gradient = tensor
        self.dtype = tensor.dtype
        self.shape = (
            tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor, out_type=tf.int64)
        )
        self.group = group
        self.member = member
