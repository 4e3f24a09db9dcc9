"""Tell a compressor with ``schedule="auto"`` where the steps of a program begin and end.

A graph cannot tell, and the collectives that measure the network run between two steps. So
:func:`scheduled` wraps a training step, and :func:`schedule_callback` is a callback of
``model.fit``.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from deepreduce_hvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from deepreduce_hvd.compressor import Compressor

Step = TypeVar("Step", bound=Callable[..., Any])


def scheduled(compressor: "Compressor") -> Callable[[Step], Step]:
    """Return a decorator for the training step of a compressor with ``schedule="auto"``.

    Each call of the step is one step of the schedule. After it, all ranks may measure the network
    or change the plan together. A ``tf.function`` is not traced again for this. With another
    schedule the step stays as it is.

    >>> # @deepreduce_hvd.tensorflow.scheduled(comp)
    >>> # @tf.function
    >>> # def step(images, labels): ...

    Args:
        compressor: the :class:`Compressor`. Steps that share it can be decorated separately.

    Returns:
        The decorator. All ranks call the decorated function equally often.

    Raises:
        InvalidArgumentError: the decorated function is called while a function of TensorFlow is
            traced.
    """
    auto = compressor.adapter.auto
    if auto is None:
        return lambda function: function

    def decorate(function: Step) -> Step:
        @functools.wraps(function, updated=())
        def step(*arguments: Any, **options: Any) -> Any:
            if not tf.executing_eagerly():
                raise InvalidArgumentError(
                    "scheduled: expected a call outside of functions of TensorFlow, got one while"
                    " a function is traced; write @deepreduce_hvd.tensorflow.scheduled(comp) above"
                    " @tf.function"
                )
            compressor.adapter.auto.step_begins()
            result = function(*arguments, **options)
            compressor.adapter.auto.step_ends()
            return result

        return step  # type: ignore[return-value]  # it takes and returns the same

    return decorate


def schedule_callback(compressor: "Compressor") -> Any:
    """Return a callback of ``model.fit`` for a compressor with ``schedule="auto"``.

    Each batch is one step of the schedule, or each execution with ``steps_per_execution=``. After
    it, all ranks may measure the network or change the plan together. With another schedule the
    callback does nothing.

    >>> # callback = deepreduce_hvd.tensorflow.schedule_callback(comp)
    >>> # model.fit(dataset, callbacks=[callback])

    Args:
        compressor: the :class:`Compressor`.

    Returns:
        A ``tf.keras.callbacks.Callback``. All ranks give it to ``fit``.
    """
    auto = compressor.adapter.auto
    if auto is None:
        return tf.keras.callbacks.Callback()
    return tf.keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: compressor.adapter.auto.step_begins(),
        on_train_batch_end=lambda batch, logs=None: compressor.adapter.auto.step_ends(),
    )
