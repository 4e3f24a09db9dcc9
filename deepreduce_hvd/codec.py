"""Codec: a sparsifier, an index codec and a value codec, composed into one encoder of tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd import backends, container
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numpy_backend import encode_sparse_numpy, expect_elements, expect_scale
from deepreduce_hvd.settings import expect_keys
from deepreduce_hvd.stages.base import (
    IndexCodec,
    Memory,
    Sparsifier,
    ValueCodec,
    expect_usable,
    find,
    is_built_in,
)
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.stages.value_codecs import RawValue


def _expect(value, kind, what):
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{what}: expected a {kind.__name__}, got {value!r}")
    return value


class Codec:
    """How one tensor becomes one payload: DeepReduce's scheme (Xu et al., NeurIPS 2021), in which
    indices and values are coded apart.

    Args:
        sparsifier: which elements are sent, a :class:`Sparsifier` such as :class:`TopK`.
        index: how their indices are coded, an :class:`IndexCodec`; :class:`RawIndex` by default.
        value: how their values are coded, a :class:`ValueCodec`; :class:`RawValue` by default.

    Raises:
        InvalidArgumentError: something else than such a stage, or one of one's own that lacks a
            method or is not registered.

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
        """Whether the native core runs this codec with ``memory``; NumPy does where a stage is the
        user's own.
        """
        return all(map(is_built_in, (self.sparsifier, self.index, self.value, memory)))

    def fields(self, memory: Memory, step: int = 0) -> list[float]:
        """The 20 numbers by which the native core knows this codec with ``memory``."""
        return [
            *self.sparsifier.fields(step),
            *self.index.fields(),
            *self.value.fields(),
            *memory.fields(),
        ]

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
            gradient: (d,) float32, float16 or float64 NumPy array, torch tensor or TF tensor
                (bfloat16 too in those).
            residual: None, or (d,) float32 of the same kind (a ``tf.Variable`` on TensorFlow):
                added to the gradient first, and left in place as what the payload does not carry.
            memory: another :class:`Memory` than :class:`Residual`; ``residual`` is then its array,
                or the tuple of its arrays.
            step, seed, tensor, rank: integers of at least 0 that key the random choices; ``step``
                drives schedules such as TopK's warm-up too, ``tensor`` stands for the tensor's
                name. ``rank`` keys those that should differ between ranks (stochastic rounding),
                never the selection.

        Returns:
            (n,) uint8 of the gradient's kind. A gradient with NaN or Inf makes a payload that
            decodes to NaN everywhere and leaves ``residual`` as it was. When compression would not
            pay, all elements are sent.

        Raises:
            InvalidArgumentError: wrong dtype, shape or kind, more than 2^31 - 1 elements, or a key
                that is no integer in [0, 2^63).
        """
        expect_keys(step=step, seed=seed, tensor=tensor, rank=rank)
        state = () if residual is None else residual if isinstance(residual, tuple) else (residual,)
        if memory is None:
            memory = Residual() if state else NoMemory()
        expect_usable(_expect(memory, Memory, "memory"))
        if len(state) != len(memory.state):
            raise InvalidArgumentError(
                f"residual: expected the {len(memory.state)} arrays that {memory!r} keeps "
                f"({', '.join(memory.state)}), got {len(state)}"
            )
        payload, _ = backends.of(gradient).encode(
            self, memory, gradient, state, 0.0, seed, step, tensor, rank
        )
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
        """Encodes a tensor of ``d`` elements that is 0 except where given, with the index and value
        codecs; nothing is selected.

        Work and memory are in proportion to the elements given, unless the index codec itself needs
        more (Bitmap, Bloom).

        Args:
            indices: (k,) uint32 NumPy array, ascending, distinct, below ``d``.
            values: (k,) float32 NumPy array; left in place as what the payload lacks of each.
            step, seed, tensor, rank, dtype: as for :meth:`encode`.

        Returns:
            (payload, added indices, added values): what a lossy index codec adds is reported as
            what the payload lacks there, minus the number that it decodes to; usually empty. A NaN
            or Inf makes a non-finite payload and leaves ``values`` as they were.

        Raises:
            InvalidArgumentError: wrong dtypes, shapes or indices.
        """
        expect_keys(step=step, seed=seed, tensor=tensor, rank=rank)
        if dtype not in container.DTYPES:
            raise InvalidArgumentError(
                f"dtype: expected one of {', '.join(container.DTYPES)}, got {dtype!r}"
            )
        expect_elements(d)
        return encode_sparse_numpy(self, indices, values, d, step, seed, tensor, rank, dtype)


def decode(payload: Any, max_elements: int | None = None) -> Any:
    """The dense tensor of a payload: (n,) uint8 -> (d,) float32 of the same kind.

    A non-finite payload is NaN everywhere.

    Args:
        max_elements: the most elements that are taken: a payload of 40 bytes can ask for 8 GiB. By
            default 2^24 (64 MiB), or 4096 for each byte of the payload if that is more. Give a
            larger number, up to 2^31 - 1, for what you trust.

    Raises:
        CorruptPayloadError: the bytes are not a payload of this format.
        UnknownCodecError: of a codec that is not registered here.
        InvalidArgumentError: the payload's d exceeds ``max_elements``, or ``payload`` is not (n,)
            uint8.
    """
    if max_elements is not None:
        expect_keys(max_elements=max_elements)
    return backends.of(payload).decode(payload, max_elements)


def decode_sum(payloads: Sequence[Any], out: Any, scale: float = 1.0) -> Any:
    """``out`` (d,) float32 += ``scale`` * the dense tensor of each payload, in the order given;
    returns ``out``.

    Args:
        payloads: (n,) uint8 arrays, NumPy, torch or TF as ``out``, each of a tensor of d elements.
        out: a NumPy array or torch tensor, contiguous, or a ``tf.Variable``.

    A non-finite payload makes all of ``out`` NaN. When a payload is refused, ``out`` is left
    part-summed.

    Raises:
        CorruptPayloadError, UnknownCodecError: as for :func:`decode`.
        InvalidArgumentError: a payload of another number of elements, or wrong dtypes or shapes.
    """
    expect_scale(scale)
    return backends.of(out).decode_sum(list(payloads), out, scale)


def inspect(data: Any) -> dict[str, Any]:
    """What a payload, (n,) uint8 NumPy, torch or TF, says of itself, as a dict; its sections are
    not decoded.

    "version"; "index" and "value", the codecs' names ("all" where no indices travel, "none" of
    values of a non-finite payload); "dtype" of the gradient; "non_finite"; "order" of the values;
    "d" elements, "k" of them sent; "header_bytes", "index_bytes", "value_bytes", "order_bytes" and
    their sum "total_bytes".

    Raises:
        CorruptPayloadError, UnknownCodecError: as for :func:`decode`.

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
