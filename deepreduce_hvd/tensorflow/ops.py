"""TensorFlow tensors: operators over the native core, and the backend for the neutral layers."""

import ctypes
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from deepreduce_hvd import backends, container, errors, numpy_backend as neutral
from deepreduce_hvd.arrays import expect_finite
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.stages.base import Memory

if TYPE_CHECKING:
    from deepreduce_hvd.codec import Codec
    from deepreduce_hvd.compressor import Compressor


def _library() -> pathlib.Path:
    directory = pathlib.Path(__file__).parent.parent
    return backends.operator_library(directory, "_tf_ops", "TensorFlow", tf.__version__)


def _load_operators() -> Any:
    library = _library()
    try:
        return tf.load_op_library(str(library))
    except tf.errors.OpError as error:
        raise errors.NativeMissingError(
            f"deepreduce_hvd: expected {library.name} to load into TensorFlow, got:"
            f" {error.message}; run `python -m deepreduce_hvd --build`"
        ) from None


def _find_cuda_supports() -> Callable[[Sequence[float]], bool] | None:
    function = getattr(ctypes.CDLL(str(_library())), "deepreduce_tf_cuda_supports", None)
    if function is None:
        return None

    def supports(fields: Sequence[float]) -> bool:
        numbers = np.array(fields, dtype=np.float64)
        return bool(function(numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_double))))

    return supports


operators = _load_operators()
#: function of a codec's 20 numbers: whether GPUs support it; None in a build without CUDA kernels
cuda_supports = _find_cuda_supports()

DTYPES = {getattr(tf, name): code for name, code in container.DTYPES.items()}
#: status of the core that a kernel's error stands for, as in tf_ops/core.h
_STATUS = {
    tf.errors.DataLossError: errors.Status.CORRUPT_PAYLOAD,
    tf.errors.InvalidArgumentError: errors.Status.INVALID_ARGUMENT,
    tf.errors.UnimplementedError: errors.Status.UNKNOWN_CODEC,
    tf.errors.ResourceExhaustedError: errors.Status.OUT_OF_MEMORY,
}
_ERRORS = {
    **{kernels: errors.OF_STATUS[status] for kernels, status in _STATUS.items()},
    tf.errors.AbortedError: errors.PeerFailedError,  # a notice of a rank, see tf_ops/messages.h
}
#: text that the runtime adds around a kernel's message
_DECORATION = re.compile(r"^(\{\{.*?\}\} )+|( \[Op:\w+\] name: .*| \[Op:\w+\].*)$", re.DOTALL)


def checked(operator: Callable[..., Any], *arguments: Any, **attributes: Any) -> Any:
    """Call an operator eagerly; raise its failure as one of the package's own errors."""
    try:
        return operator(*arguments, **attributes)
    except tuple(_ERRORS) as error:
        raise _ERRORS[type(error)](_DECORATION.sub("", error.message)) from None


@tf.autograph.experimental.do_not_convert
def allreduce_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], compression: "Compressor", op: Any = None
) -> list[Any]:
    """Reduce gradients over all ranks, with tf.IndexedSlices of embeddings compressed as slices.

    Horovod itself would send slices uncompressed. A job of one process compresses nothing.

    >>> # gradients = tape.gradient(loss, variables)      # of a plain tf.GradientTape
    >>> # reduce = deepreduce_hvd.tensorflow.allreduce_gradients
    >>> # gradients = reduce(gradients, variables, compression=comp)

    Args:
        gradients: tensors, tf.IndexedSlices or None, one for each of ``variables``. Each rank adds
            up slices of the same row, then compresses the indices and values of all rows. The
            sparsifier is not used for slices.
        variables: the variables of the gradients.
        compression: a :class:`Compressor`. Slices need NoMemory or Residual; Residual then stores
            the encoding error of the rows sent.
        op: hvd.Average (the default) or hvd.Sum.

    Returns:
        A list of tensors, tf.IndexedSlices (distinct ascending rows) or None.

    Raises:
        InvalidArgumentError: a variable that the compressor was not given; slices with a codec,
            memory or communicator that does not support them; a single gradient or variable; or
            ``compression`` is not a Compressor.
    """
    if not hasattr(compression, "adapter"):
        own = type(compression).__name__
        got = f"the class {compression.__name__}" if isinstance(compression, type) else own
        raise errors.InvalidArgumentError(
            f"allreduce_gradients compression: expected a Compressor, got {got};"
            " dr.Compressor('dense', parameters=variables) sends gradients uncompressed"
        )
    gradients = listed(gradients, "allreduce_gradients", "gradient")
    variables = listed(variables, "allreduce_gradients", "variable")
    if len(gradients) != len(variables):
        raise errors.InvalidArgumentError(
            f"allreduce_gradients: expected a gradient or None for each of the {len(variables)}"
            f" variables, got {len(gradients)}"
        )
    adapter = compression.adapter
    with adapter.void_steps.reduce_together():
        return [
            adapter.allreduce(gradient, variable, op)
            for gradient, variable in zip(gradients, variables)
        ]


def listed(values: Any, caller: str, kind: str) -> list[Any]:
    """Return variables or tensors as a list; a single one is refused, because it yields its rows.

    Args:
        values: the variables or tensors.
        caller: name of the function that was given them.
        kind: what one of them is, such as "variable".
    """
    if hasattr(values, "dtype"):
        raise errors.InvalidArgumentError(
            f"{caller}: expected a list of {kind}s, got one {type(values).__name__}; write [{kind}]"
        )
    return list(values)


def encode_flat(
    codec: "Codec",
    memory: Memory,
    gradient: Any,
    state: Sequence[Any],
    seed: int,
    step: int,
    tensor: int,
    rank: int,
) -> Any:
    """Encode one gradient; return the payload, (n,) uint8.

    The ``state`` variables are updated in place.
    """
    if codec.is_native(memory):
        position = [seed, step, tensor, rank]
        with tf.device(gradient.device):
            return checked(
                operators.deepreduce_encode,
                gradient,
                [codec.fields(memory, step)],
                position,
                [part.handle for part in state],
                [],
            )
    if not hasattr(gradient, "numpy"):
        raise errors.InvalidArgumentError(
            f"gradient: expected an eager tensor for {codec!r} with {memory!r}, which runs in"
            " NumPy, got a symbolic tensor; encode outside of tf.function"
        )
    array = gradient.numpy()
    bfloat16 = gradient.dtype == tf.bfloat16
    arrays = tuple(part.numpy() for part in state)
    data, _ = neutral.encode_numpy(
        codec,
        memory,
        array.astype(np.float32) if bfloat16 else array,
        arrays,
        0.0,
        seed,
        step,
        tensor,
        rank,
        dtype=DTYPES[tf.bfloat16] if bfloat16 else None,
    )
    for part, new in zip(state, arrays):
        part.assign(new)
    return tf.constant(data)


class _TensorFlow:
    """The backend behind Codec.encode, decode, decode_sum and inspect for TensorFlow tensors."""

    def encode(
        self,
        codec: "Codec",
        memory: Memory,
        gradient: Any,
        state: Sequence[Any],
        threshold: float,
        seed: int,
        step: int,
        tensor: int,
        rank: int,
    ) -> tuple[Any, float]:
        if isinstance(gradient, tf.Variable):
            gradient = tf.convert_to_tensor(gradient)
        dense = isinstance(gradient, tf.Tensor)  # tf.is_tensor includes sparse ones
        if not dense or gradient.shape.rank != 1 or gradient.dtype not in DTYPES:
            names = ", ".join(dtype.name for dtype in DTYPES)
            raise errors.InvalidArgumentError(
                f"gradient: expected a dense 1-D TensorFlow tensor of {names}, got"
                f" {_describe(gradient)}"
            )
        for name, part in zip(memory.state, state):
            if (
                not isinstance(part, tf.Variable)
                or part.dtype != tf.float32
                or part.shape != gradient.shape
            ):
                raise errors.InvalidArgumentError(
                    f"{name}: expected a float32 tf.Variable of shape {gradient.shape}, got"
                    f" {_describe(part)}"
                )
        if len({id(part) for part in state}) < len(state):  # the operator would wait for itself
            raise errors.InvalidArgumentError(
                f"{', '.join(memory.state)}: expected a variable for each, got the same one"
            )
        if tf.executing_eagerly():
            for name, part in zip(memory.state, state):
                expect_finite(name, bool(tf.reduce_all(tf.math.is_finite(part))))
        return encode_flat(codec, memory, gradient, state, seed, step, tensor, rank), 0.0

    def decode(self, payload: Any, max_elements: int | None) -> Any:
        data = self.to_numpy_bytes(payload)
        d = neutral.elements_of(data, max_elements)
        if not neutral.all_native([data]):
            return tf.constant(neutral.decode_numpy(data, max_elements))
        with tf.device(payload.device):
            return checked(
                operators.deepreduce_decode_sum,
                payload,
                np.float64(1),
                [d],
                1,
                [],
                [],
                [],
                [],
                T=tf.float32,
            )

    def decode_sum(self, payloads: Sequence[Any], out: Any, scale: float) -> Any:
        if not isinstance(out, tf.Variable) or out.dtype != tf.float32 or out.shape.rank != 1:
            raise errors.InvalidArgumentError(
                f"out: expected a 1-D float32 tf.Variable, got {_describe(out)}"
            )
        arrays = [self.to_numpy_bytes(payload) for payload in payloads]
        if neutral.all_native(arrays):
            initial = tf.convert_to_tensor(out)
            for payload, array in zip(payloads, arrays):
                _native.inspect(array)  # one payload only; the operator would take several
                with tf.device(initial.device):
                    initial = checked(
                        operators.deepreduce_decode_sum,
                        payload,
                        np.float64(scale),
                        initial.shape,
                        1,
                        [initial],
                        [],
                        [],
                        [],
                        T=tf.float32,
                    )
        else:
            initial = neutral.decode_sum_numpy(arrays, out.numpy(), scale)
        out.assign(initial)  # which itself returns another object
        return out

    def to_numpy_bytes(self, payload: Any) -> np.ndarray:
        dense = isinstance(payload, tf.Tensor)
        if not dense or payload.dtype != tf.uint8 or payload.shape.rank != 1:
            raise errors.InvalidArgumentError(
                f"payload: expected a 1-D uint8 tensor, got {_describe(payload)}"
            )
        if not hasattr(payload, "numpy"):
            raise errors.InvalidArgumentError(
                "payload: expected an eager tensor, got a symbolic tensor; decode outside of"
                " tf.function"
            )
        return np.ascontiguousarray(payload.numpy())


def _describe(value: Any) -> str:
    if not isinstance(value, (tf.Tensor, tf.Variable)):
        return type(value).__name__
    return f"{value.dtype.name} of shape {value.shape}"


backend = _TensorFlow()
