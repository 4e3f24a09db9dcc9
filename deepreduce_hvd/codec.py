"""Codec: a sparsifier, an index codec and a value codec, composed into one encoder of tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd import backends, payload as container, reference
from deepreduce_hvd.arrays import expect_apart, expect_array
from deepreduce_hvd.errors import InvalidArgument, NativeMissing
from deepreduce_hvd.index import RawIndex
from deepreduce_hvd.memory import NoMemory, Residual
from deepreduce_hvd.settings import expect_keys, is_integer, is_number
from deepreduce_hvd.stage import (
    FIRST_USER_ID,
    IndexCodec,
    Memory,
    Sparsifier,
    ValueCodec,
    expect_usable,
    find,
    is_built_in,
)  # fmt: skip
from deepreduce_hvd.value import RawValue

try:
    from deepreduce_hvd import _native
except ImportError as error:
    raise NativeMissing(f"deepreduce_hvd._native: expected the built extension, got {error}; run `pip install .`") from error


def _expect(value, kind, what):
    if not isinstance(value, kind):
        raise InvalidArgument(f"{what}: expected a {kind.__name__}, got {value!r}")
    return value


class Codec:
    """How one tensor becomes one payload: DeepReduce's scheme (Xu et al., NeurIPS 2021), in which indices and values are coded apart.

    Args:
        sparsifier: which elements are sent, a :class:`Sparsifier` such as :class:`TopK`.
        index: how their indices are coded, an :class:`IndexCodec`; :class:`RawIndex` by default.
        value: how their values are coded, a :class:`ValueCodec`; :class:`RawValue` by default.

    Raises:
        InvalidArgument: something else than such a stage, or one of one's own that lacks a method or
            is not registered.

    >>> import deepreduce_hvd as dr
    >>> codec = dr.Codec(dr.TopK(k=2), index=dr.RawIndex(), value=dr.RawValue())
    >>> payload = codec.encode(np.array([0.5, 0, -3, 1], dtype=np.float32))
    >>> dr.decode(payload)
    array([ 0.,  0., -3.,  1.], dtype=float32)
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        index: IndexCodec | None = None,
        value: ValueCodec | None = None,
    ) -> None:
        self.sparsifier = _expect(sparsifier, Sparsifier, "Codec sparsifier")
        self.index = _expect(RawIndex() if index is None else index, IndexCodec, "Codec index")
        self.value = _expect(RawValue() if value is None else value, ValueCodec, "Codec value")
        for stage in (self.sparsifier, self.index, self.value):
            expect_usable(stage)

    def __repr__(self) -> str:
        return f"Codec({self.sparsifier!r}, index={self.index!r}, value={self.value!r})"

    def __getattr__(self, name):
        if name in ("compress", "decompress"):  # Horovod was given the codec itself
            raise AttributeError(
                "compression: expected a dr.Compressor, got a Codec; "
                "write dr.Compressor(codec, parameters=model.named_parameters())"
            )
        raise AttributeError(f"'Codec' object has no attribute {name!r}")

    def is_native(self, memory: Memory) -> bool:
        """Whether the native core runs this codec with ``memory``; NumPy does where a stage is the user's own."""
        return all(map(is_built_in, (self.sparsifier, self.index, self.value, memory)))

    def fields(self, memory: Memory, step: int = 0) -> list[float]:
        """The 20 numbers by which the native core knows this codec with ``memory``."""
        return [*self.sparsifier.fields(step), *self.index.fields(), *self.value.fields(), *memory.fields()]

    def encode(
        self,
        gradient: Any,
        residual: Any = None,
        step: int = 0,
        seed: int = 0,
        tensor: int = 0,
        rank: int = 0,
        memory: Memory | None = None,
    ) -> Any:
        """Encodes one tensor as a self-describing payload.

        Args:
            gradient: (d,) float32, float16 or float64 NumPy array, torch tensor or TF tensor (bfloat16 too in those).
            residual: None, or (d,) float32 of the same kind (a ``tf.Variable`` on TensorFlow): added to the gradient first, and left
                in place as what the payload does not carry.
            memory: another :class:`Memory` than :class:`Residual`; ``residual`` is then its array, or the
                tuple of its arrays.
            step, seed, tensor, rank: integers of at least 0 that key the random choices; ``step`` drives schedules such as TopK's warm-up
                too, ``tensor`` stands for the tensor's name. ``rank`` keys those that should differ between ranks (stochastic rounding),
                never the selection.

        Returns:
            (n,) uint8 of the gradient's kind. A gradient with NaN or Inf makes a payload that decodes to NaN
            everywhere and leaves ``residual`` as it was. When compression would not pay, all elements are sent.

        Raises:
            InvalidArgument: wrong dtype, shape or kind, more than 2^31 - 1 elements, or a key that is no integer in [0, 2^63).
        """
        expect_keys(step=step, seed=seed, tensor=tensor, rank=rank)
        state = () if residual is None else residual if isinstance(residual, tuple) else (residual,)
        if memory is None:
            memory = Residual() if state else NoMemory()
        expect_usable(_expect(memory, Memory, "memory"))
        if len(state) != len(memory.state):
            raise InvalidArgument(
                f"residual: expected the {len(memory.state)} arrays that {memory!r} keeps "
                f"({', '.join(memory.state)}), got {len(state)}"
            )
        payload, _ = backends.of(gradient).encode(self, memory, gradient, state, 0.0, seed, step, tensor, rank)
        return payload

    def encode_sparse(
        self,
        indices: np.ndarray,
        values: np.ndarray,
        d: int,
        step: int = 0,
        seed: int = 0,
        tensor: int = 0,
        rank: int = 0,
        dtype: str = "float32",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encodes a tensor of ``d`` elements that is 0 except where given, with the index and value codecs; nothing is selected.

        Work and memory are in proportion to the elements given, unless the index codec itself needs more (Bitmap, Bloom).

        Args:
            indices: (k,) uint32 NumPy array, ascending, distinct, below ``d``.
            values: (k,) float32 NumPy array; left in place as what the payload lacks of each.
            step, seed, tensor, rank, dtype: as for :meth:`encode`.

        Returns:
            (payload, added indices, added values): what a lossy index codec adds is reported as what the payload lacks there, minus
            the number that it decodes to; usually empty. A NaN or Inf makes a non-finite payload and leaves ``values`` as they were.

        Raises:
            InvalidArgument: wrong dtypes, shapes or indices.
        """
        expect_keys(step=step, seed=seed, tensor=tensor, rank=rank)
        if dtype not in container.DTYPES:
            raise InvalidArgument(f"dtype: expected one of {', '.join(container.DTYPES)}, got {dtype!r}")
        _expect_elements(d)
        return encode_sparse_numpy(self, indices, values, d, step, seed, tensor, rank, dtype)


_BFLOAT16 = container.DTYPES["bfloat16"]
#: codes of gradients' dtypes that NumPy has
_DTYPES = {code: np.dtype(name) for name, code in container.DTYPES.items() if code != _BFLOAT16}
#: NumPy has no bfloat16: such numbers come as they lie in memory, too
_BITS = (np.uint16, np.int16)


def as_float32(gradient, dtype):
    """Numbers of the ``dtype`` code as (d,) float32; those of bfloat16 may come as their 16 bits."""
    if dtype == _BFLOAT16 and gradient.dtype in _BITS:
        bits = gradient.view(np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return gradient.astype(np.float32)


def _as_coded(gradient, dtype):
    """Numbers of the ``dtype`` code as the native core reads them; they may come as float32."""
    if dtype != _BFLOAT16:
        return gradient.astype(_DTYPES[dtype], copy=False)
    if gradient.dtype in _BITS:
        return gradient
    return (as_float32(gradient, dtype).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _expect_gradient(gradient, dtype):
    """(contiguous gradient, code of its dtype)."""
    kinds = (*_DTYPES.values(), *(_BITS if dtype == _BFLOAT16 else ()))
    expect_array("gradient", gradient, kinds, contiguous=False)
    code = container.DTYPES[gradient.dtype.name] if dtype is None else dtype
    return np.ascontiguousarray(gradient), code


def _expect_state(memory, state, gradient):
    """The memory's arrays, as they are written to in place."""
    for name, array in zip(memory.state, state, strict=True):
        expect_array(name, array, (np.float32,), gradient.shape, writable=True)
    expect_apart(gradient=gradient, **dict(zip(memory.state, state)))


def _expect_elements(d):
    if not is_integer(d) or not 0 <= d <= container.MAX_ELEMENTS:
        raise InvalidArgument(f"d: expected an integer of at least 0 and at most {container.MAX_ELEMENTS}, got {d!r}")


def _expect_scale(scale):
    if not is_number(scale) or not abs(float(scale)) <= float(np.finfo(np.float32).max):
        raise InvalidArgument(f"scale: expected a finite float32, got {scale!r}")


def _expect_indices(indices, d):
    expect_array("indices", indices, (np.uint32,))
    _expect_elements(d)
    if indices.size and ((indices[1:] <= indices[:-1]).any() or indices[-1] >= d):
        raise InvalidArgument(f"indices: expected ascending distinct ones below d = {d}")


def encode_sparse_numpy(codec, indices, values, d, step=0, seed=0, tensor=0, rank=0, dtype="float32", native=True, simd=-1):
    """The NumPy backend of encode_sparse."""
    expect_array("indices", indices, (np.uint32,))
    expect_array("values", values, (np.float32,), indices.shape, writable=True)
    expect_apart(indices=indices, values=values)
    dtype = container.DTYPES[dtype]
    if native and codec.is_native(NoMemory()):
        return _native.encode_sparse(codec.fields(NoMemory()), indices, values, d, dtype, True, seed, step, tensor, rank, simd)
    _expect_indices(indices, d)
    stages = (codec.index, codec.value)
    payload, values[...], added = reference.encode_sparse(stages, indices, values, d, dtype, seed, step, tensor, rank)
    return payload, *added


def select_numpy(codec, memory, gradient, state, threshold=0.0, seed=0, step=0, tensor=0, given=None, native=True, simd=-1, dtype=None):
    """Error feedback and selection without coding; ``state`` is left without what was selected.

    ``given`` (k,) uint32 ascending: what to take instead of the sparsifier's choice. Returns (indices (k,) uint32, values (k,) float32,
    next threshold); indices and values are None when the gradient is not finite, and the state is then as it was.
    """
    gradient, dtype = _expect_gradient(gradient, dtype)
    _expect_state(memory, state, gradient)
    if given is not None:
        _expect_indices(given, gradient.size)
    if native and is_built_in(codec.sparsifier) and is_built_in(memory):
        fields = [*codec.sparsifier.fields(step), *RawIndex().fields(), *RawValue().fields(), *memory.fields()]
        return _native.select(
            fields, _as_coded(gradient, dtype), dtype, *state, *[None] * (2 - len(state)),
            threshold=threshold, seed=seed, step=step, tensor=tensor, given=given, simd=simd,
        )  # fmt: skip
    stages, numbers = (codec.sparsifier, memory), as_float32(gradient, dtype)
    selected = reference.select(stages, numbers, state, given, seed, step, tensor)
    if selected is None:
        return None, None, threshold
    indices, values, new_state = selected
    for array, new in zip(state, new_state):
        array[...] = new
    return indices, values, threshold


def encode_numpy(codec, memory, gradient, state, threshold, seed, step, tensor, rank, native=True, simd=-1, dtype=None):
    """The NumPy backend of encode: ``state`` arrays are updated in place; returns (payload, next threshold).

    ``dtype`` overrides the gradient's own dtype code, for bfloat16 numbers that come as float32 or as their bits.
    """
    gradient, dtype = _expect_gradient(gradient, dtype)
    _expect_state(memory, state, gradient)
    if native and codec.is_native(memory):
        payload, threshold, _ = _native.encode(
            codec.fields(memory, step), _as_coded(gradient, dtype), dtype, *state, *[None] * (2 - len(state)),
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
    """Whether the native core knows every codec of the payloads (bytes 6 and 7 are the ids)."""
    return all(data.size < 8 or max(int(data[6]), int(data[7])) < FIRST_USER_ID for data in payloads)


def decode(payload: Any, max_elements: int | None = None) -> Any:
    """The dense tensor of a payload: (n,) uint8 -> (d,) float32 of the same kind.

    A non-finite payload is NaN everywhere.

    Args:
        max_elements: the most elements that are taken: a payload of 40 bytes can ask for 8 GiB. By default
            2^24 (64 MiB), or 4096 for each byte of the payload if that is more. Give a larger number, up to
            2^31 - 1, for what you trust.

    Raises:
        CorruptPayload: the bytes are not a payload of this format.
        UnknownCodec: of a codec that is not registered here.
        InvalidArgument: the payload's d exceeds ``max_elements``, or ``payload`` is not (n,) uint8.
    """
    if max_elements is not None:
        expect_keys(max_elements=max_elements)
    return backends.of(payload).decode(payload, max_elements)


def decode_sum(payloads: Sequence[Any], out: Any, scale: float = 1.0) -> Any:
    """``out`` (d,) float32 += ``scale`` * the dense tensor of each payload, in the order given; returns ``out``.

    Args:
        payloads: (n,) uint8 arrays, NumPy, torch or TF as ``out``, each of a tensor of d elements.
        out: a NumPy array or torch tensor, contiguous, or a ``tf.Variable``.

    A non-finite payload makes all of ``out`` NaN. When a payload is refused, ``out`` is left part-summed.

    Raises:
        CorruptPayload, UnknownCodec: as for :func:`decode`.
        InvalidArgument: a payload of another number of elements, or wrong dtypes or shapes.
    """
    _expect_scale(scale)
    return backends.of(out).decode_sum(list(payloads), out, scale)


def decode_sum_sparse(
    payloads: Sequence[Any], d: int, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """``scale`` * the sum of the payloads, (n,) uint8 NumPy arrays, as ((m,) uint32 ascending distinct indices, (m,) float32 values).

    Work and memory follow the elements sent, unless a codec is the user's own or needs more (Bitmap, Bloom).

    Raises:
        CorruptPayload, UnknownCodec: as for :func:`decode`.
        InvalidArgument: a payload of another number of elements than ``d``, or one that is non-finite: such a sum has no sparse form.
    """
    _expect_scale(scale)
    _expect_elements(d)
    payloads = [check_bytes(data) for data in payloads]
    if all_native(payloads):
        return _native.decode_sparse(payloads, d, scale)
    dense = np.zeros(d, dtype=np.float32)
    support = np.zeros(d, dtype=bool)
    for data in payloads:
        sent = reference.decode_sparse(data, d)
        if sent is None:
            raise InvalidArgument("a payload is non-finite: its sum has no sparse form")
        dense[sent[0]] += np.float32(scale) * sent[1]
        support[sent[0]] = True
    indices = np.flatnonzero(support).astype(np.uint32)
    return indices, dense[indices]


def check_bytes(data):
    """``data`` as a contiguous uint8 array, or InvalidArgument."""
    expect_array("payload", data, (np.uint8,), contiguous=False)
    return np.ascontiguousarray(data)


def decode_numpy(data, max_elements):
    """The NumPy backend of decode."""
    return decode_sum_numpy([data], np.zeros(elements_of(data, max_elements), dtype=np.float32), 1.0)


def elements_of(data, max_elements):
    """How many elements a payload, (n,) uint8 NumPy, has; InvalidArgument when those are too many."""
    d = inspect(data)["d"]
    most, why = max_elements, ""
    if max_elements is None:
        most = _native.default_max_elements(data.size)
        why = f", the default for {data.size} bytes (give a larger one for what you trust)"
    if d > most:
        raise InvalidArgument(f"payload: expected at most max_elements = {most} elements{why}, got {d}")
    return d


def decode_sum_numpy(payloads, out, scale, native=True, simd=-1):
    """The NumPy backend of decode_sum."""
    add_payloads(payloads, out, scale, native, simd)
    return out


def add_payloads(payloads, out, scale, native=True, simd=-1):
    """What decode_sum does with NumPy arrays.

    Returns:
        The largest magnitude that an addition left in any element, NaN being the largest of all. No addition has
        overflowed unless it is Inf or NaN.
    """
    expect_array("out", out, (np.float32,), writable=True)
    payloads = [check_bytes(data) for data in payloads]
    if native and all_native(payloads):
        return _native.decode_sum(payloads, out, scale, simd)
    return reference.decode_sum(payloads, out, scale)


def inspect(data: Any) -> dict[str, Any]:
    """What a payload, (n,) uint8 NumPy, torch or TF, says of itself, as a dict; its sections are not decoded.

    "version"; "index" and "value", the codecs' names ("all" where no indices travel, "none" of values of a non-finite payload); "dtype" of the
    gradient; "non_finite"; "order" of the values; "d" elements, "k" of them sent; "header_bytes", "index_bytes", "value_bytes", "order_bytes"
    and their sum "total_bytes".

    Raises:
        CorruptPayload, UnknownCodec: as for :func:`decode`.

    >>> import deepreduce_hvd as dr
    >>> about = dr.inspect(dr.Codec(dr.TopK(k=2), index=dr.Rice()).encode(np.arange(9, dtype=np.float32)))
    >>> about["index"], about["value"], about["d"], about["k"], about["index_bytes"], about["total_bytes"]
    ('Rice', 'RawValue', 9, 2, 3, 51)
    """
    data = backends.of(data).to_numpy_bytes(data)
    parts = container.read(data)
    non_finite = bool(parts.flags & container.NON_FINITE)
    return {
        "version": container.VERSION,
        "index": find(IndexCodec, parts.index_id).__name__ if parts.index_id else "all",
        "value": "none" if non_finite else find(ValueCodec, parts.value_id).__name__,
        "dtype": next(name for name, code in container.DTYPES.items() if code == parts.dtype),
        "non_finite": non_finite,
        "order": ("ascending", "permutation", "indices in value order")[parts.order],
        "d": parts.d,
        "k": parts.count,
        "header_bytes": container.HEADER.size,
        "index_bytes": len(parts.index),
        "value_bytes": len(parts.values),
        "order_bytes": len(parts.order_map),
        "total_bytes": parts.total_bytes(),
    }
