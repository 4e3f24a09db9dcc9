"""Gradients between compress and decompress, and the messages that they share."""

import collections
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule.dag import CODEC

if TYPE_CHECKING:
    from deepreduce_hvd.compressor import Compressor


def message_groups(compressor: "Compressor") -> list[list[Any]]:
    """Return the messages of a plan, for the argument ``groups=`` of Horovod's tape and optimizers.

    Horovod decides which gradients share a message on TensorFlow. With these groups it follows the
    plan.

    >>> # plan = deepreduce_hvd.schedule.Plan.load("plan.json")
    >>> # comp = deepreduce_hvd.Compressor(parameters=variables, schedule=plan)
    >>> # groups = deepreduce_hvd.tensorflow.message_groups(comp)
    >>> # tape = hvd.DistributedGradientTape(tape, compression=comp, groups=groups)

    Args:
        compressor: a :class:`Compressor` with a plan.

    Returns:
        One list of tf.Variable for each message that is encoded, in the order of the plan. Horovod
        reduces each of the other variables on its own. A tape or an optimizer that uses the groups
        must have a gradient for at least one variable of each.

    Raises:
        InvalidArgumentError: the compressor has no plan; or several of its variables have the same
            name, as in Keras 3. With groups, Horovod would lose all of their gradients but one.
    """
    variables = compressor.adapter.variables.by_name()
    if compressor.plan is None:
        raise InvalidArgumentError(
            "message_groups: expected a compressor with a plan, such as"
            " Compressor(schedule=Plan.load('plan.json')), got one without"
        )
    groups = [
        [variables[name] for name in message.members if name in variables]
        for message in compressor.plan.messages
        if message.way == CODEC
    ]
    names = collections.Counter(variable.name for variable in variables.values())
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise InvalidArgumentError(
            "message_groups: expected variables with different names, because Horovod would lose"
            f" gradients of the others with groups=, got several named {', '.join(repeated[:3])};"
            " without groups=, the plan sets how each variable is sent, and its density"
        )
    return groups


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
        step, last_scale: the slot's step counter, and its ``scale_to_compare()``.
    """

    def __init__(self, slot, tensor, group, member, step=None, last_scale=None):
        self.slot = slot
        self.step = step
        self.last_scale = last_scale
        self.gradient = tensor
        self.dtype = tensor.dtype
        self.shape = (
            tensor.shape.as_list()
            if tensor.shape.is_fully_defined()
            else tf.shape(tensor, out_type=tf.int64)
        )
        self.group = group
        self.member = member
