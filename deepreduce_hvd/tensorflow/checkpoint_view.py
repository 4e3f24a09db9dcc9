"""The state of a compressor in checkpoints of TensorFlow."""

import json
import zlib

import tensorflow as tf
from tensorflow.python.trackable.autotrackable import AutoTrackable

from deepreduce_hvd.checkpoints import checkpoint
from deepreduce_hvd.errors import InvalidArgumentError


class CheckpointView(AutoTrackable):
    """The state of a compressor for a checkpoint.

    It is no tf.Module, whose variables a layer of Keras would count among its own: a broadcast of
    the layer's variables would give all ranks the residuals of one.
    """

    def __init__(self, slots, compressor):
        self.slots = slots
        self.identity = Identity(compressor)


class Identity(tf.train.experimental.PythonState):
    """The identity of the compressor and rank, saved in a checkpoint.

    TensorFlow restores it before any variable, so a refused checkpoint changes no variable.
    """

    def __init__(self, compressor):
        self._compressor = compressor  # a checkpoint may be all that holds it

    @property
    def _adapter(self):
        return self._compressor.adapter

    def _own(self):
        adapter = self._adapter
        adapter.expect_member("checkpoint of the compressor")
        rank = adapter.transport.rank
        return {
            "configuration": adapter.compressor.configuration,
            "rank": rank,
            "size": adapter.transport.size,
            "keeper": adapter.keeper_of(rank),
        }

    def serialize(self):
        adapter = self._adapter
        adapter.close_steps()  # the variables are read after this
        scaled = {"loss_scale": True} if adapter.void_steps.active else {}
        own = {
            "memories": self._memories(),
            "steps": {slot.label: slot.steps for slot in adapter.slots.values()},
            "tables": {
                slot.label: slot.is_table
                for slot in adapter.slots.values()
                if slot.is_table is not None
            },
            "reductions": {
                slot.label: slot.reduction
                for slot in adapter.slots.values()
                if slot.reduction is not None
            },
        }
        return json.dumps({**checkpoint.identity(**self._own()), **own, **scaled})

    def _memories(self):
        """Return a CRC of the names of the variables that have a memory."""
        names = [slot.label for slot in self._adapter.slots.values() if slot.state_names]
        return zlib.crc32(repr(sorted(names)).encode())

    def deserialize(self, string_value):
        adapter, found = self._adapter, json.loads(string_value)
        follows, expected = found.pop("loss_scale", False), adapter.void_steps.active
        memories, steps = found.pop("memories", None), found.pop("steps", {})
        tables, reductions = found.pop("tables", {}), found.pop("reductions", {})
        checkpoint.check_identity("compressor checkpoint", found, **self._own())
        if follows != expected:
            expected, got = ("with" if follow else "without" for follow in (expected, follows))
            raise InvalidArgumentError(
                f"compressor checkpoint: expected one saved {expected} loss_scale=, like this"
                f" Compressor, got one saved {got}"
            )
        # TensorFlow would ignore a saved memory without a variable
        if memories != self._memories():
            raise InvalidArgumentError(
                "compressor checkpoint: expected one with memories of the same variables as this"
                " Compressor, got others; with schedule=, variables that the plan sends"
                " uncompressed have no memory"
            )
        adapter.void_steps.forget(adapter.slots.values())
        for slot in adapter.slots.values():
            slot.is_table = tables.get(slot.label)
            slot.reduction = slot.reduction or reductions.get(slot.label)
            slot.memory_changes()
            # the variable with the number of steps is restored after this
            slot.untimed_steps += steps.get(slot.label, slot.steps) - slot.steps
