"""Elastic training on TensorFlow: Horovod's elastic states with a Compressor.

>>> # comp = dr.Compressor(parameters=model.trainable_variables)
>>> # elastic = deepreduce_hvd.tensorflow.elastic
>>> # state = elastic.TensorFlowKerasState(model, optimizer, compressor=comp, epoch=0)

Use these in place of Horovod's own states. Horovod pickles the further arguments of its states and
sends them to all ranks, which is not possible with a compressor. Everything else is as Horovod
documents it, including ``hvd.elastic.run`` and the callbacks for Keras.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import horovod.tensorflow.elastic as horovod_elastic
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.keras.elastic import KerasState as HorovodKerasState

from deepreduce_hvd.adapters.base_adapter import BaseAdapter, ClosedAdapter
from deepreduce_hvd.coordination.elastic import MemoryKeeper, save_together
from deepreduce_hvd.coordination.handshake_messages import by_rank
from deepreduce_hvd.errors import InvalidArgumentError

# For type checkers, the mixin derives from the class that it is combined with at run time.
if TYPE_CHECKING:
    from horovod.tensorflow.elastic import TensorFlowKerasState as _State

    from deepreduce_hvd.compressor import Compressor
else:
    _State = object


class _WithCompressor(_State):
    """Add the compressor's memories to what a state of Horovod saves, restores and syncs."""

    # Horovod assigns these, without types
    _saved_model_state: Any
    _saved_optimizer_state: Any

    def __init__(self, *args: Any, compressor: "Compressor", **kwargs: Any) -> None:
        adapter = getattr(compressor, "adapter", None)
        if not isinstance(adapter, (BaseAdapter, ClosedAdapter)):
            raise InvalidArgumentError(
                f"{type(self).__name__} compressor: expected a Compressor, got {compressor!r}"
            )
        if not tf.executing_eagerly():
            raise InvalidArgumentError(
                f"{type(self).__name__}: expected eager execution, got a graph of tf.compat.v1"
            )
        self.compressor = compressor
        self._keeper = MemoryKeeper(compressor, HorovodInternalError)
        self._only_removed = False
        self._failure: HorovodInternalError | None = None
        super().__init__(*args, **kwargs)
        self._saved_scale = [tf.identity(one) for one in _of_loss_scale(self.optimizer)]

    def save(self) -> None:
        self._raise_failure()
        with _failures():
            save_together([self._keeper])
            super().save()
        self._saved_scale = [tf.identity(one) for one in _of_loss_scale(self.optimizer)]

    def restore(self) -> None:
        self._failure = None
        self._keeper.restore()
        super().restore()
        for variable, saved in zip(_of_loss_scale(self.optimizer), self._saved_scale):
            variable.assign(saved)

    def sync(self) -> None:
        with _failures():
            self._keeper.sync()
            self._expect_equal_numbers()
            saved = self._saved_model_state, self._saved_optimizer_state
            try:
                broadcast_variables(_of_loss_scale(self.optimizer), root_rank=0)
                super().sync()
            except Exception:
                # it saves the model before its last broadcast, and restore would mix two commits
                self._saved_model_state, self._saved_optimizer_state = saved
                raise
            self._saved_scale = [tf.identity(one) for one in _of_loss_scale(self.optimizer)]
            self._keeper.adopt()

    def _expect_equal_numbers(self) -> None:
        """Raise InvalidArgumentError on all ranks if they have different numbers of variables.

        The first ranks would otherwise wait forever for the others to broadcast more variables.
        """
        own = np.array([len(self.model.variables), len(self.optimizer.variables())], np.int64)
        transport = self.compressor.adapter.transport
        gathered = transport.wait(
            transport.allgather(own.view(np.uint8), "deepreduce.elastic.variables")
        )
        numbers = np.frombuffer(bytes(gathered), np.int64).reshape(-1, len(own))
        for what, column in zip(("model", "optimizer"), numbers.T):
            if len(set(column)) > 1:
                raise InvalidArgumentError(
                    f"{type(self).__name__} sync: expected the same number of variables of the"
                    f" {what} on all ranks, got {by_rank(transport.ranks, map(str, column))};"
                    " create all of them before the state, with"
                    " optimizer.build(model.trainable_variables) or by a step that is not reduced"
                )

    def check_host_updates(self) -> None:
        self._raise_failure()
        try:
            with _failures():
                super().check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            self._only_removed = interrupt.skip_sync
            self.save()  # the ranks that leave are still there
            raise

    def on_reset(self) -> None:
        super().on_reset()
        if not self._only_removed:
            return
        self._only_removed = False  # Horovod does not call sync then
        try:
            with _failures():
                self._keeper.sync()
        except HorovodInternalError as failure:  # Horovod catches it only in training
            self._failure = failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class TensorFlowKerasState(_WithCompressor, horovod_elastic.TensorFlowKerasState):
    """Elastic state with a compressor, instead of ``hvd.elastic.TensorFlowKerasState``.

    Args:
        model: the Keras model. It must be built.
        optimizer: the optimizer, or None if the model is compiled with one.
        backend: the Keras backend, only for TensorFlow 1.
        compressor: the :class:`Compressor` of this model's gradients.
        kwargs: further properties to synchronize. They become attributes of the state.

    Raises:
        InvalidArgumentError: ``compressor`` is not a :class:`Compressor` or has a process set, or
            execution is not eager.
    """


class KerasState(_WithCompressor, HorovodKerasState):
    """Elastic state with a compressor, instead of ``horovod.tensorflow.keras.elastic.KerasState``.

    It takes the same arguments as :class:`TensorFlowKerasState`, except ``backend``.
    """


def _of_loss_scale(optimizer: Any) -> list[Any]:
    """Return the variables of a dynamic loss scale of Keras 2, which ``variables()`` leaves out."""
    scale: Any = getattr(optimizer, "_loss_scale", None)
    if not hasattr(scale, "current_loss_scale"):
        return []
    return [scale.current_loss_scale, scale.counter]


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise Horovod's failures as HorovodInternalError, which its elastic loop handles.

    TensorFlow raises them as its own errors.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if "Horovod" not in error.message:
            raise
        raise HorovodInternalError(error.message) from error
