"""The public function prepare, which sets an optimizer up for error feedback.

The type of the optimizer names its framework, and the module of that framework makes the changes.
"""

import importlib
from typing import Any

from deepreduce_hvd.compressor import Compressor
from deepreduce_hvd.errors import InvalidArgumentError

#: top-level module of an optimizer's type -> the module of this package that prepares it
_MODULES = {
    "torch": "deepreduce_hvd.torch.prepare",
    "keras": "deepreduce_hvd.tensorflow.prepare",
    "tf_keras": "deepreduce_hvd.tensorflow.prepare",
    "tensorflow": "deepreduce_hvd.tensorflow.prepare",
}


def prepare(optimizer: Any, compression: Any) -> Any:
    """Prepare an optimizer for a compressor with error feedback.

    A prepared optimizer updates parameters whose gradients are delayed without momentum. SGD and
    RMSprop use momentum 0, and divide the learning rate by 1 - momentum, so that the step size does
    not change. Adam and its variants (AdamW, Adamax; on PyTorch also NAdam, RAdam) use 0 as the
    first of ``betas``, or as ``beta_1``. Embedding tables that the default codec finds keep their
    momentum, except in PyTorch's NAdam. Adagrad and Adadelta have no momentum, so nothing changes.
    With ``MomentumCorrection(m)``, a weight decay that is added to gradients is divided by 1 - m.
    With :class:`NoMemory` or :class:`NoneSparsifier`, nothing is delayed, so nothing changes
    either.

    Parameters that the compressor does not compress are updated as before. A parameter that has
    a codec counts as compressed even while a plan sends it uncompressed. On TensorFlow, this does
    not hold for a plan that is given as ``schedule=``.

    Sparse gradients that Horovod itself gathers are applied as before: on PyTorch those of
    ``sparse=True`` without ``sparse_as_dense=True``, on TensorFlow ``tf.IndexedSlices``. So are
    gradients of TensorFlow that Horovod does not reduce, as after ``register_local_var``.

    A job of one process compresses nothing, but a prepared optimizer still steps there without
    momentum, and SGD and RMSprop with the larger learning rate. Do not prepare it there: without
    compression, it trains worse.

    The settings that you read from the optimizer do not change. Learning rate schedulers can change
    them, and each step uses the current ones.

    >>> # comp = dr.Compressor(parameters=model.named_parameters())
    >>> # opt = dr.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), comp)
    >>> # named = model.named_parameters()
    >>> # opt = hvd.DistributedOptimizer(opt, named_parameters=named, compression=comp)

    Args:
        optimizer: a PyTorch or Keras optimizer, before ``hvd.DistributedOptimizer`` wraps it and
            before a learning rate scheduler is made for it; on TensorFlow also before a training
            function that uses it is traced. It is changed in place.
        compression: the :class:`Compressor`, or None to undo the preparation.

    Returns:
        ``optimizer``. Rank 0 of the compressor's process set prints what changes.

    Raises:
        InvalidArgumentError: ``optimizer`` is not a known optimizer, is of a PyTorch subclass with
            a ``step`` of its own, is wrapped by Horovod or has a scheduler already, or its momentum
            is 1 or more. Or ``compression`` is not a Compressor.
    """
    if compression is not None and not isinstance(compression, Compressor):
        kind, hint = type(compression), ""
        if isinstance(compression, type):
            kind = compression
            hint = " itself, a class; write dr.Compressor(parameters=model.named_parameters())"
        elif isinstance(optimizer, Compressor):
            hint = "; the optimizer comes first: dr.prepare(optimizer, compressor)"
        raise InvalidArgumentError(
            f"prepare compression: expected a Compressor or None, got {kind.__name__}{hint}"
        )
    for kind in type(optimizer).__mro__:
        module = _MODULES.get(kind.__module__.partition(".")[0])
        if module is not None:
            changes = importlib.import_module(module).prepare(optimizer, compression)
            if compression is not None and compression.adapter.speaks:
                print(f"deepreduce_hvd: prepared {changes}", flush=True)
            return optimizer
    raise InvalidArgumentError(
        f"prepare optimizer: expected a PyTorch or Keras optimizer, got {type(optimizer).__name__}"
    )
