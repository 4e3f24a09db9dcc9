"""Codec: a sparsifier, an index codec and a value codec, composed into one encoder of tensors."""

import numpy as np

from deepreduce_hvd import backends, payload as container, reference
from deepreduce_hvd.errors import InvalidArgument, NativeMissing
from deepreduce_hvd.index import RawIndex
from deepreduce_hvd.memory import NoMemory, Residual
from deepreduce_hvd.settings import expect_keys, is_integer
from deepreduce_hvd.stage import FIRST_USER_ID, IndexCodec, Sparsifier, ValueCodec, find
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
        InvalidArgument: something else than such a stage.

    >>> import deepreduce_hvd as dr
    >>> codec = dr.Codec(dr.TopK(k=2), index=dr.RawIndex(), value=dr.RawValue())
    >>> payload = codec.encode(np.array([0.5, 0, -3, 1], dtype=np.float32))
    >>> dr.decode(payload)
    array([ 0.,  0., -3.,  1.], dtype=float32)
    """

    def __init__(self, sparsifier, index=None, value=None):
        self.sparsifier = _expect(sparsifier, Sparsifier, "Codec sparsifier")
        self.index = _expect(RawIndex() if index is None else index, IndexCodec, "Codec index")
        self.value = _expect(RawValue() if value is None else value, ValueCodec, "Codec value")

    def __repr__(self):
        return f"Codec({self.sparsifier!r}, index={self.index!r}, value={self.value!r})"

    @property
    def native(self):
        """Whether the native core runs this codec; a codec of the user's own runs in NumPy."""
        return all(stage.wire_id < FIRST_USER_ID for stage in (self.sparsifier, self.index, self.value))

    def fields(self, memory, step=0):
        """The 20 numbers by which the native core knows this codec with ``memory``."""
        return [*self.sparsifier.fields(step), *self.index.fields(), *self.value.fields(), *memory.fields()]

    def encode(self, gradient, residual=None, step=0, seed=0, tensor=0, rank=0):
        """Encodes one tensor as a self-describing payload.

        Args:
            gradient: (d,) float32, float16 or float64 NumPy array, torch tensor or TF tensor (bfloat16 too in those).
            residual: None, or (d,) float32 of the same kind (a ``tf.Variable`` on TensorFlow): added to the gradient first, and left
                in place as what the payload does not carry.
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
        memory = NoMemory() if residual is None else Residual()
        state = () if residual is None else (residual,)
        payload, _ = backends.of(gradient).encode(self, memory, gradient, state, 0.0, seed, step, tensor, rank)
        return payload

    def encode_sparse(self, indices, values, d, step=0, seed=0, tensor=0, rank=0, dtype="float32"):
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
        if not is_integer(d):
            raise InvalidArgument(f"d: expected an integer, got {d!r}")
        return encode_sparse_numpy(self, indices, values, d, step, seed, tensor, rank, dtype)


def _expect_array(name, array, dtype, shape=None):
    """A contiguous 1-D array of ``dtype``, or InvalidArgument."""
    good = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype and array.flags.c_contiguous
    if not good or (shape is not None and array.shape != shape):
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidArgument(f"{name}: expected a contiguous 1-D {np.dtype(dtype).name} array{'' if shape is None else f' of shape {shape}'}, got {got}")


def _expect_indices(indices, d):
    _expect_array("indices", indices, np.uint32)
    if not 0 <= d <= container.MAX_ELEMENTS:
        raise InvalidArgument(f"d: expected at most {container.MAX_ELEMENTS}, got {d}")
    if indices.size and ((indices[1:] <= indices[:-1]).any() or indices[-1] >= d):
        raise InvalidArgument(f"indices: expected ascending distinct ones below d = {d}")


def encode_sparse_numpy(codec, indices, values, d, step=0, seed=0, tensor=0, rank=0, dtype="float32", native=True, simd=-1):
    """The NumPy backend of encode_sparse."""
    _expect_array("indices", indices, np.uint32)
    _expect_array("values", values, np.float32, indices.shape)
    dtype = container.DTYPES[dtype]
    if native and codec.native:
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
    gradient = np.ascontiguousarray(gradient)
    if given is not None:
        _expect_indices(given, gradient.size)
    if native and codec.sparsifier.wire_id < FIRST_USER_ID:
        fields = [*codec.sparsifier.fields(step), *RawIndex().fields(), *RawValue().fields(), *memory.fields()]
        dtype = container.DTYPES[gradient.dtype.name] if dtype is None else dtype
        return _native.select(
            fields, gradient, dtype, *state, *[None] * (2 - len(state)), threshold=threshold, seed=seed, step=step, tensor=tensor,
            given=given, simd=simd,
        )  # fmt: skip
    with np.errstate(over="ignore"):
        as_float32 = gradient.astype(np.float32)
    selected = reference.select((codec.sparsifier, memory), as_float32, state, given, seed, step, tensor)
    if selected is None:
        return None, None, threshold
    indices, values, new_state = selected
    for array, new in zip(state, new_state):
        array[...] = new
    return indices, values, threshold


def encode_numpy(codec, memory, gradient, state, threshold, seed, step, tensor, rank, native=True, simd=-1, dtype=None):
    """The NumPy backend of encode: ``state`` arrays are updated in place; returns (payload, next threshold).

    ``dtype`` overrides the gradient's own dtype code, for bfloat16 numbers that come as float32.
    """
    if not isinstance(gradient, np.ndarray) or gradient.ndim != 1 or gradient.dtype.name not in container.DTYPES:
        got = f"{gradient.dtype} of shape {gradient.shape}" if isinstance(gradient, np.ndarray) else type(gradient).__name__
        raise InvalidArgument(f"gradient: expected a 1-D array of {', '.join(container.DTYPES)}, got {got}")
    for name, array in zip(memory.state, state):
        good = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == gradient.shape
        if not good or not array.flags.c_contiguous or not array.flags.writeable:
            got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidArgument(f"{name}: expected a writable contiguous float32 array of shape {gradient.shape}, got {got}")
    gradient = np.ascontiguousarray(gradient)
    dtype = container.DTYPES[gradient.dtype.name] if dtype is None else dtype
    if native and codec.native:
        payload, threshold, _ = _native.encode(
            codec.fields(memory, step), gradient, dtype, *state, *[None] * (2 - len(state)), threshold=threshold,
            seed=seed, step=step, tensor=tensor, rank=rank, simd=simd,
        )  # fmt: skip
        return payload, threshold
    stages = (codec.sparsifier, codec.index, codec.value, memory)
    with np.errstate(over="ignore"):
        as_float32 = gradient.astype(np.float32)
    payload, new_state = reference.encode(stages, as_float32, dtype, state, seed, step, tensor, rank)
    for array, new in zip(state, new_state):
        array[...] = new
    return payload, 0.0


def all_native(payloads):
    """Whether the native core knows every codec of the payloads (bytes 6 and 7 are the ids)."""
    return all(data.size < 8 or max(int(data[6]), int(data[7])) < FIRST_USER_ID for data in payloads)


def decode(payload, max_elements=container.MAX_ELEMENTS):
    """The dense tensor of a payload: (n,) uint8 -> (d,) float32 of the same kind.

    ``max_elements`` bounds the memory that a payload from an untrusted source can ask for. A non-finite payload is NaN everywhere.

    Raises:
        CorruptPayload: the bytes are not a payload of this format.
        UnknownCodec: of a codec that is not registered here.
        InvalidArgument: the payload's d exceeds ``max_elements``, or ``payload`` is not (n,) uint8.
    """
    return backends.of(payload).decode(payload, max_elements)


def decode_sum(payloads, out, scale=1.0):
    """``out`` (d,) float32 += ``scale`` * the dense tensor of each payload, in the order given; returns ``out``.

    Args:
        payloads: (n,) uint8 arrays, NumPy, torch or TF as ``out``, each of a tensor of d elements.
        out: a NumPy array or torch tensor, contiguous, or a ``tf.Variable``.

    A non-finite payload makes all of ``out`` NaN. When a payload is refused, ``out`` is left part-summed.

    Raises:
        CorruptPayload, UnknownCodec: as for :func:`decode`.
        InvalidArgument: a payload of another number of elements, or wrong dtypes or shapes.
    """
    return backends.of(out).decode_sum(list(payloads), out, scale)


def decode_sum_sparse(payloads, d, scale=1.0):
    """``scale`` * the sum of the payloads, (n,) uint8 NumPy arrays, as ((m,) uint32 ascending distinct indices, (m,) float32 values).

    Work and memory follow the elements sent, unless a codec is the user's own or needs more (Bitmap, Bloom).

    Raises:
        CorruptPayload, UnknownCodec: as for :func:`decode`.
        InvalidArgument: a payload of another number of elements than ``d``, or one that is non-finite: such a sum has no sparse form.
    """
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
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        got = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise InvalidArgument(f"payload: expected a 1-D uint8 array, got {got}")
    return np.ascontiguousarray(data)


def decode_numpy(data, max_elements):
    """The NumPy backend of decode."""
    d = inspect(data)["d"]
    if d > max_elements:
        raise InvalidArgument(f"payload: expected at most max_elements = {max_elements} elements, got {d}")
    return decode_sum_numpy([data], np.zeros(d, dtype=np.float32), 1.0)


def decode_sum_numpy(payloads, out, scale, native=True, simd=-1):
    """The NumPy backend of decode_sum."""
    if not isinstance(out, np.ndarray) or out.ndim != 1 or out.dtype != np.float32 or not out.flags.c_contiguous:
        got = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InvalidArgument(f"out: expected a contiguous 1-D float32 array, got {got}")
    payloads = [check_bytes(data) for data in payloads]
    if native and all_native(payloads):
        _native.decode_sum(payloads, out, scale, simd)
    else:
        reference.decode_sum(payloads, out, scale)
    return out


def inspect(data):
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
