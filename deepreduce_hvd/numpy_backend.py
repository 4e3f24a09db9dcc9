"""The backend for NumPy arrays.

Built-in stages run in the native core. Codecs with a custom stage run in Python.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd import container, reference
from deepreduce_hvd.argument_checks import is_integer, is_number
from deepreduce_hvd.arrays import expect_apart, expect_array
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.native import core as _native
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.stages import calls
from deepreduce_hvd.stages.base import is_built_in
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.memories import NoMemory
from deepreduce_hvd.stages.registry import FIRST_USER_ID
from deepreduce_hvd.stages.value_codecs import RawValue

_BFLOAT16 = container.DTYPES["bfloat16"]
#: {code of a gradient's dtype: NumPy dtype}, for the dtypes that NumPy has
_DTYPES = {code: np.dtype(name) for name, code in container.DTYPES.items() if code != _BFLOAT16}
#: NumPy has no bfloat16: these dtypes hold the bits of such numbers
_BITS = (np.uint16, np.int16)


def as_float32(gradient, dtype):
    """Convert numbers of the dtype with the code ``dtype`` to (d,) float32.

    bfloat16 numbers may be given as (d,) uint16 or int16 arrays of their bits.
    """
    if dtype == _BFLOAT16 and gradient.dtype in _BITS:
        bits = gradient.view(np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return gradient.astype(np.float32)


def _as_coded(gradient, dtype):
    """Convert numbers to the dtype with the code ``dtype``, as the native core reads them.

    The numbers may be given as float32. bfloat16 numbers are returned as 16-bit integers.
    """
    if dtype != _BFLOAT16:
        return gradient.astype(_DTYPES[dtype], copy=False)
    if gradient.dtype in _BITS:
        return gradient
    return (as_float32(gradient, dtype).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _expect_gradient(gradient, dtype):
    """Check a gradient and return (contiguous gradient, code of its dtype)."""
    kinds = (*_DTYPES.values(), *(_BITS if dtype == _BFLOAT16 else ()))
    expect_array("gradient", gradient, kinds, contiguous=False)
    code = container.DTYPES[gradient.dtype.name] if dtype is None else dtype
    return np.ascontiguousarray(gradient), code


def residual_and_velocity(state):
    """Return the two state arrays for a call of the core; None for those that a memory lacks."""
    return (*state, *[None] * (2 - len(state)))


def _expect_state(memory, state, gradient):
    """Check the state arrays of a memory, which are written in place."""
    for name, array in zip(memory.state, state, strict=True):
        expect_array(name, array, (np.float32,), gradient.shape, writable=True)
    expect_apart(gradient=gradient, **dict(zip(memory.state, state)))


def expect_elements(d):
    if not is_integer(d) or not 0 <= d <= container.MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"d: expected an integer of at least 0 and at most {container.MAX_ELEMENTS}, got {d!r}"
        )


def expect_scale(scale):
    if not is_number(scale) or not abs(float(scale)) <= float(np.finfo(np.float32).max):
        raise InvalidArgumentError(f"scale: expected a finite float32, got {scale!r}")


def _expect_indices(indices, d):
    expect_array("indices", indices, (np.uint32,))
    expect_elements(d)
    (wrong,) = np.nonzero(indices[1:] <= indices[:-1])
    if wrong.size:
        first, second = indices[wrong[0] : wrong[0] + 2]
        raise InvalidArgumentError(
            f"indices: expected ascending distinct ones, got {first} followed by {second}"
        )
    if indices.size and indices[-1] >= d:
        raise InvalidArgumentError(f"indices: expected less than d = {d}, got {indices[-1]}")


def encode_sparse_numpy(
    codec,
    indices,
    values,
    d,
    step=0,
    seed=0,
    tensor=0,
    rank=0,
    dtype="float32",
    native=True,
    simd=-1,
):
    """Implement :meth:`Codec.encode_sparse` for NumPy arrays."""
    expect_array("indices", indices, (np.uint32,))
    expect_array("values", values, (np.float32,), indices.shape, writable=True)
    expect_apart(indices=indices, values=values)
    dtype = container.DTYPES[dtype]
    if native and codec.is_native(NoMemory()):
        return _native.encode_sparse(
            codec.fields(NoMemory()),
            indices,
            values,
            d,
            dtype,
            True,
            seed,
            step,
            tensor,
            rank,
            simd,
        )
    _expect_indices(indices, d)
    stages = (codec.index, codec.value)
    payload, values[...], added = reference.encode_sparse(
        stages, indices, values, d, dtype, seed, step, tensor, rank
    )
    return payload, *added


def select_numpy(
    codec,
    memory,
    gradient,
    state,
    threshold=0.0,
    seed=0,
    step=0,
    tensor=0,
    given=None,
    native=True,
    simd=-1,
    dtype=None,
    finite=False,
):
    """Apply error feedback and selection to a gradient, without encoding.

    ``state`` is updated in place as if exactly the selected values were sent.

    Args:
        given: (k,) uint32 ascending indices to take instead of the sparsifier's selection.
        finite: whether the gradient is known to contain neither NaN nor Inf.

    Returns:
        A tuple (indices (k,) uint32, values (k,) float32, threshold for the next step). If the
        gradient contains NaN or Inf, indices and values are None and ``state`` is unchanged.
    """
    gradient, dtype = _expect_gradient(gradient, dtype)
    _expect_state(memory, state, gradient)
    if given is not None:
        _expect_indices(given, gradient.size)
    if native and is_built_in(codec.sparsifier) and is_built_in(memory):
        fields = [
            *codec.sparsifier.fields(step),
            *RawIndex().fields(),
            *RawValue().fields(),
            *memory.fields(),
        ]
        return _native.select(
            fields, _as_coded(gradient, dtype), dtype, *residual_and_velocity(state),
            threshold=threshold, seed=seed, step=step, tensor=tensor, given=given, finite=finite,
            simd=simd,
        )  # fmt: skip
    stages, numbers = (codec.sparsifier, memory), as_float32(gradient, dtype)
    selected = reference.select(stages, numbers, state, given, seed, step, tensor)
    if selected is None:
        return None, None, threshold
    indices, values, new_state = selected
    for array, new in zip(state, new_state):
        array[...] = new
    return indices, values, threshold


def encode_numpy(
    codec,
    memory,
    gradient,
    state,
    threshold,
    seed,
    step,
    tensor,
    rank,
    native=True,
    simd=-1,
    dtype=None,
):
    """Implement :meth:`Codec.encode` for NumPy arrays; update the ``state`` arrays in place.

    Args:
        dtype: a dtype code that replaces the dtype of the array, for bfloat16 numbers that are
            given as float32 or as their bits.

    Returns:
        A tuple (payload, threshold for the next step).
    """
    gradient, dtype = _expect_gradient(gradient, dtype)
    _expect_state(memory, state, gradient)
    if native and codec.is_native(memory):
        payload, threshold, _ = _native.encode(
            codec.fields(memory, step), _as_coded(gradient, dtype), dtype,
            *residual_and_velocity(state),
            threshold=threshold, seed=seed, step=step, tensor=tensor, rank=rank, simd=simd,
        )  # fmt: skip
        return payload, threshold
    stages = (codec.sparsifier, codec.index, codec.value, memory)
    numbers = as_float32(gradient, dtype)
    payload, new_state = reference.encode(stages, numbers, dtype, state, seed, step, tensor, rank)
    for array, new in zip(state, new_state):
        array[...] = new
    return payload, 0.0


def all_native(payloads):
    """Return whether the native core knows all codecs of the payloads.

    Payloads shorter than a header count as native; the core rejects them.

    Args:
        payloads: (n,) uint8 NumPy arrays, which need only have the header.
    """
    return all(max(container.codec_ids(data)) < FIRST_USER_ID for data in payloads)


def decode_sum_sparse(
    payloads: Sequence[Any], d: int, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``scale`` times the sum of the payloads as a sparse tensor.

    Time and memory are proportional to the number of elements sent. They are proportional to d if a
    codec is a custom one, if an index codec is Bitmap or Bloom, if a value codec that sorts is used
    with RawIndex, or if a payload has all elements.

    Args:
        payloads: (n,) uint8 NumPy arrays.
        d: the number of elements of each payload's tensor.
        scale: a finite float32 number.

    Returns:
        A tuple (indices, values) of (m,) uint32, ascending and distinct, and (m,) float32.

    Raises:
        CorruptPayloadError, UnknownCodecError: as for :func:`decode`.
        InvalidArgumentError: a payload has another number of elements than ``d``, or a payload is
            non-finite. The sum with a non-finite payload has no sparse form.
    """
    expect_scale(scale)
    expect_elements(d)
    payloads = [check_bytes(data) for data in payloads]
    if all_native(payloads):
        return _native.decode_sparse(payloads, d, scale)
    dense = np.zeros(d, dtype=np.float32)
    support = np.zeros(d, dtype=bool)
    for position, data in enumerate(payloads):
        sent = reference.decode_sparse(data, d)
        if sent is None:
            raise InvalidArgumentError(
                "payloads: expected finite ones, got a non-finite payload at position"
                f" {position}, whose sum has no sparse form"
            )
        dense[sent[0]] += np.float32(scale) * sent[1]
        support[sent[0]] = True
    indices = np.flatnonzero(support).astype(np.uint32)
    return indices, dense[indices]


def keep_largest_numpy(indices, values, k, native=True, simd=-1):
    """Divide a sparse tensor into its k largest elements and the rest.

    Elements are ordered by magnitude; of equal ones, the smaller index comes first.

    Args:
        indices: (n,) uint32, ascending.
        values: (n,) float32.
        k: the number of elements to keep.

    Returns:
        A tuple (indices, values of the k largest, indices, values of the rest). All indices are
        ascending.
    """
    if native:
        return _native.keep_largest(indices, values, k, simd)
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    kept = np.zeros(indices.size, dtype=bool)
    kept[np.argsort(~magnitudes, kind="stable")[:k]] = True
    return indices[kept], values[kept], indices[~kept], values[~kept]


def put_back_numpy(memory, state, indices, values, start=0, native=True):
    """Return values to ``state`` that were taken from it but did not reach the sum.

    Args:
        memory: the :class:`Memory`.
        state: its (d,) float32 state arrays, updated in place.
        indices: (n,) uint32, ascending, indices in the bucket; ``start`` is subtracted.
        values: (n,) float32.
        start: the number of the tensor's first element.
    """
    if native and is_built_in(memory):
        if memory.state:
            _native.put_back(memory.fields(), indices, values, state[0], start)
        return
    lost = is_nonzero(values)
    if lost.any():
        calls.put_back(memory, state, indices[lost] - np.uint32(start), values[lost])


def add_sparse_numpy(indices, values, out, scale, start=0, native=True):
    """Add ``scale`` times a sparse tensor to ``out``, in place.

    Args:
        indices: (n,) uint32, ascending, indices in the bucket; ``start`` is subtracted.
        values: (n,) float32.
        out: (d,) float32.
        scale: a finite float32 number.
        start: the number of the first element of ``out``.

    Returns:
        The largest magnitude of any result of an addition, as from :func:`add_payloads`.
    """
    if native:
        return _native.add_sparse(indices, values, out, scale, start)
    places = indices - np.uint32(start)
    with np.errstate(over="ignore", invalid="ignore"):
        out[places] += np.float32(scale) * values
    return np.abs(out[places]).max(initial=0)


def check_bytes(data):
    """Return ``data`` as a contiguous (n,) uint8 array.

    Raises:
        InvalidArgumentError: ``data`` is not a 1-D uint8 array.
    """
    expect_array("payload", data, (np.uint8,), contiguous=False)
    return np.ascontiguousarray(data)


def decode_numpy(data, max_elements):
    """Implement :func:`decode` for NumPy arrays."""
    return decode_sum_numpy(
        [data], np.zeros(elements_of(data, max_elements), dtype=np.float32), 1.0
    )


def elements_of(data, max_elements):
    """Return the number of elements of a payload, an (n,) uint8 NumPy array.

    Raises:
        InvalidArgumentError: the payload has more than ``max_elements`` elements.
    """
    d = container.read(check_bytes(data)).d
    most, why = max_elements, ""
    if max_elements is None:
        most = _native.default_max_elements(data.size)
        why = f", the default for {data.size} bytes (pass a larger one for data that you trust)"
    if d > most:
        raise InvalidArgumentError(
            f"payload: expected at most max_elements = {most} elements{why}, got {d}"
        )
    return d


def decode_sum_numpy(payloads, out, scale, native=True, simd=-1):
    """Implement :func:`decode_sum` for NumPy arrays."""
    add_payloads(payloads, out, scale, native, simd)
    return out


def add_payloads(payloads, out, scale, native=True, simd=-1):
    """Add ``scale`` times each decoded payload to ``out``, as :func:`decode_sum` does.

    Returns:
        The largest magnitude of any result of an addition; NaN counts as the largest. If it is
        finite, no addition overflowed.
    """
    expect_array("out", out, (np.float32,), writable=True)
    payloads = [check_bytes(data) for data in payloads]
    if native and all_native(payloads):
        return _native.decode_sum(payloads, out, scale, simd)
    return reference.decode_sum(payloads, out, scale)
