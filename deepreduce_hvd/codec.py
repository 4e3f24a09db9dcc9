"""Codec: encode tensors with a sparsifier, an index codec and a value codec."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepreduce_hvd import backends, container
from deepreduce_hvd.argument_checks import expect_keys, expect_unset
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.numpy_backend import encode_sparse_numpy, expect_elements, expect_scale
from deepreduce_hvd.stages.base import IndexCodec, Memory, Sparsifier, ValueCodec, is_built_in
from deepreduce_hvd.stages.index_codecs import RawIndex
from deepreduce_hvd.stages.memories import NoMemory, Residual
from deepreduce_hvd.stages.registry import find
from deepreduce_hvd.stages.suggestions import article, called, makes, written
from deepreduce_hvd.stages.usable import expect_usable
from deepreduce_hvd.stages.value_codecs import RawValue


def _expect(value, kind, what):
    if not isinstance(value, kind):
        raise InvalidArgumentError(
            f"{what}: expected {article(kind)}, got {value!r}{_meant(value, kind)}"
        )
    return value


def _meant(value, kind):
    """Return a suggestion to append to the message for a value of the wrong type, or ""."""
    if isinstance(value, str):
        text = called(value, kind)
        return f"; write {text}" if text else ""
    if isinstance(value, type) and makes(value, kind):
        return f"; write {written(value)} to pass an instance"
    if makes(value, Sparsifier):
        return f"; write Codec({written(value)}, ...), with the sparsifier first"
    for other, name in ((IndexCodec, "index"), (ValueCodec, "value"), (Memory, "memory")):
        if makes(value, other):
            call = "Compressor" if other is Memory else "Codec"
            return f"; write {call}(..., {name}={written(value)})"
    return ""


class _InvalidAttributeError(InvalidArgumentError, AttributeError):
    """Horovod got a Codec instead of a Compressor. An AttributeError, so that ``hasattr`` works."""


class Codec:
    """An encoder of single tensors, made of a sparsifier, an index codec and a value codec.

    Indices and values are encoded separately, as in DeepReduce (Xu et al., NeurIPS 2021).

    Args:
        sparsifier: selects the elements to send; a :class:`Sparsifier` such as :class:`TopK`.
        index: encodes the indices of the selected elements; an :class:`IndexCodec`. Default:
            :class:`RawIndex`.
        value: encodes the values of the selected elements; a :class:`ValueCodec`. Default:
            :class:`RawValue`.

    Raises:
        InvalidArgumentError: an argument is not a stage of the right kind, or it is a custom stage
            that lacks a method or is not registered.

    >>> import deepreduce_hvd as dr
    >>> codec = dr.Codec(dr.TopK(k=2), index=dr.RawIndex(), value=dr.RawValue())
    >>> payload = codec.encode(np.array([0.5, 0, -3, 1], dtype=np.float32))
    >>> dr.decode(payload)
    array([ 0.,  0., -3.,  1.], dtype=float32)
    """

    example_arguments = "TopK(0.01)"  # for the example call in error messages

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

    def with_stages(
        self, sparsifier: Sparsifier | None = None, value: ValueCodec | None = None
    ) -> "Codec":
        """Return this codec with another sparsifier or value codec.

        The stages that stay are not checked again: a custom stage that was used may have attributes
        that are refused at first.

        Args:
            sparsifier: the new :class:`Sparsifier`, or None for that of this codec.
            value: the new :class:`ValueCodec`, or None for that of this codec.

        Returns:
            A new :class:`Codec`.
        """
        for stage in (sparsifier, value):
            if stage is not None:
                expect_usable(stage)
        changed = Codec.__new__(Codec)
        changed.sparsifier = self.sparsifier if sparsifier is None else sparsifier
        changed.index = self.index
        changed.value = self.value if value is None else value
        return changed

    def __setattr__(self, name: str, value: Any) -> None:
        expect_unset(self, name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Codec({self.sparsifier!r}, index={self.index!r}, value={self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and (self.sparsifier, self.index, self.value) == (
            other.sparsifier, other.index, other.value
        )  # fmt: skip

    def __hash__(self) -> int:
        # only the types: settings of custom stages may be equal but have another repr
        return hash((type(self.sparsifier), type(self.index), type(self.value)))

    def __getattr__(self, name):
        if name in ("compress", "decompress"):  # the user passed the codec to Horovod
            raise _InvalidAttributeError(
                "compression: expected a dr.Compressor, got a Codec; "
                "write dr.Compressor(codec, parameters=model.named_parameters())"
            )
        raise AttributeError(f"'Codec' object has no attribute {name!r}")

    def is_native(self, memory: Memory) -> bool:
        """Return whether the native core can run this codec with a memory.

        Codecs with a custom stage run in NumPy instead.

        Args:
            memory: the memory.

        Returns:
            True if all four stages are built-in ones.
        """
        return self._is_built_in and is_built_in(memory)

    def fields(self, memory: Memory, step: int = 0) -> list[float]:
        """Return the numbers that describe this codec with a memory to the native core.

        Args:
            memory: a built-in memory.
            step: the training step. It matters only for sparsifiers with a schedule.

        Returns:
            A list of 20 numbers. It has the stage id and four parameters of the sparsifier, the
            index codec, the value codec and the memory, in this order. All stages must be built-in
            ones (:meth:`is_native`).
        """
        return [*self.sparsifier.fields(step), *self._encoding, *memory.fields()]

    @functools.cached_property
    def _is_built_in(self):
        """Whether its three stages are built-in ones; asked for each gradient of each step."""
        return all(map(is_built_in, (self.sparsifier, self.index, self.value)))

    @functools.cached_property
    def _encoding(self):
        """The numbers of the index codec and the value codec, for each gradient of each step."""
        return [*self.index.fields(), *self.value.fields()]

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
        """Encode one tensor as a self-describing payload.

        Args:
            gradient: (d,) float32, float16 or float64; a NumPy array, torch tensor or TensorFlow
                tensor. Tensors may also be bfloat16.
            residual: None, or a (d,) float32 array of the same kind as ``gradient`` (on TensorFlow,
                a ``tf.Variable``). It is added to the gradient before encoding. It is then
                overwritten in place with the part that the payload does not carry. After an
                error of a stage, such as of a Bloom filter that is too large, it is undefined.
            step: the training step. It also drives schedules such as the warm-up of TopK.
            seed: the seed of all random choices.
            tensor: a number that identifies the tensor.
            rank: the rank. It changes only random choices that should differ between ranks, such as
                stochastic rounding. It never changes the selection.
            memory: a :class:`Memory` to use instead of :class:`Residual`. ``residual`` is then the
                state array of this memory, or a tuple of its state arrays.

        Returns:
            The payload, (n,) uint8, of the same kind as ``gradient``. If the gradient contains NaN
            or Inf, or a float64 value outside of the range of float32, the payload decodes to NaN
            everywhere, and ``residual`` is unchanged. If the encoded payload would be larger than
            the dense tensor, the payload carries all elements instead.

        Raises:
            InvalidArgumentError: ``gradient`` or ``residual`` has a wrong dtype, shape or kind,
                ``residual`` contains NaN or Inf (a ``tf.function`` does not check this), the tensor
                has more than 2^31 - 1 elements, or ``step``, ``seed``, ``tensor`` or ``rank`` is
                not an integer in [0, 2^63).
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
        payload, _ = backends.of("gradient", gradient).encode(
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
        """Encode a sparse tensor of ``d`` elements with the index and value codecs.

        All given elements are sent; the sparsifier is not used. Time and memory are proportional to
        the number of given elements, unless the index codec needs more (Bitmap, Bloom).

        Args:
            indices: (k,) uint32 NumPy array, ascending, distinct, less than ``d``.
            values: (k,) float32 NumPy array. It is overwritten in place with the part that the
                payload does not carry: each value minus its decoded value. The decoded value is 0
                for an element that a lossy index codec leaves out.
            d: the number of elements of the dense tensor.
            step, seed, tensor, rank: as for :meth:`encode`.
            dtype: the dtype that the payload records for the gradient: "float32", "float16",
                "bfloat16" or "float64".

        Returns:
            A tuple (payload, added indices, added values). A lossy index codec can add elements
            that were not given. The last two arrays list their indices and the negatives of their
            decoded values. They are usually empty. If ``values`` contains NaN or Inf, the payload
            is non-finite and ``values`` is unchanged.

        Raises:
            InvalidArgumentError: an argument has a wrong dtype, shape or value.
        """
        expect_keys(step=step, seed=seed, tensor=tensor, rank=rank)
        if dtype not in container.DTYPES:
            raise InvalidArgumentError(
                f"dtype: expected one of {', '.join(container.DTYPES)}, got {dtype!r}"
            )
        expect_elements(d)
        return encode_sparse_numpy(self, indices, values, d, step, seed, tensor, rank, dtype)


def decode(payload: Any, max_elements: int | None = None) -> Any:
    """Decode a payload to a dense tensor.

    A non-finite payload decodes to NaN everywhere.

    Args:
        payload: (n,) uint8; a NumPy array, torch tensor or TensorFlow tensor.
        max_elements: the largest number of elements to accept. A payload of 40 bytes can claim 8
            GiB of elements, so there is a limit. The default is 2^24 elements (64 MiB) or 4096
            elements per byte of the payload, whichever is more. For payloads that you trust, pass a
            larger number, up to 2^31 - 1.

    Returns:
        The decoded tensor, (d,) float32, of the same kind as ``payload``.

    Raises:
        CorruptPayloadError: the bytes are not a valid payload.
        UnknownCodecError: the payload uses a codec that is not registered in this process.
        InvalidArgumentError: the payload has more than ``max_elements`` elements, or ``payload`` is
            not an (n,) uint8 array.
    """
    if max_elements is not None:
        expect_keys(max_elements=max_elements)
    return backends.of("payload", payload).decode(payload, max_elements)


def decode_sum(payloads: Sequence[Any], out: Any, scale: float = 1.0) -> Any:
    """Add ``scale`` times each decoded payload to ``out``, in the given order.

    A non-finite payload sets all of ``out`` to NaN. If a payload is refused, ``out`` is left with a
    partial sum.

    Args:
        payloads: (n,) uint8 arrays of the same kind as ``out`` (NumPy, torch or TensorFlow), each
            of a tensor of d elements.
        out: (d,) float32; a contiguous NumPy array or torch tensor, or a ``tf.Variable``. It is
            updated in place.
        scale: a finite float32 number.

    Returns:
        ``out``.

    Raises:
        CorruptPayloadError, UnknownCodecError: as for :func:`decode`.
        InvalidArgumentError: a payload has another number of elements than ``out``, or an argument
            has a wrong dtype or shape.
    """
    expect_scale(scale)
    if len(getattr(payloads, "shape", (0, 0))) < 2:
        raise InvalidArgumentError(
            "payloads: expected a list of payloads, got one; write [payload]"
        )
    return backends.of("out", out).decode_sum(list(payloads), out, scale)


def inspect(data: Any) -> dict[str, Any]:
    """Return what the header of a payload says, without decoding the sections.

    Args:
        data: the payload, (n,) uint8; a NumPy array, torch tensor or TensorFlow tensor.

    Returns:
        A dictionary with the following keys.

        - "version": the version of the format.
        - "index", "value": the names of the codecs. "index" is "all" if the payload has no indices,
          because it carries all elements or is non-finite. "value" is "none" if it is non-finite.
        - "dtype": the dtype of the gradient.
        - "non_finite": whether the payload stands for a gradient with NaN or Inf.
        - "order": the order of the values.
        - "d", "k": the number of elements of the tensor, and how many of them were sent.
        - "header_bytes", "index_bytes", "value_bytes", "order_bytes": the size of each part.
        - "total_bytes": the sum of these sizes.

    Raises:
        CorruptPayloadError, UnknownCodecError: as for :func:`decode`.

    >>> import deepreduce_hvd as dr
    >>> codec = dr.Codec(dr.TopK(k=2), index=dr.Rice())
    >>> about = dr.inspect(codec.encode(np.arange(9, dtype=np.float32)))
    >>> about["index"], about["value"], about["d"], about["k"]
    ('Rice', 'RawValue', 9, 2)
    >>> about["index_bytes"], about["total_bytes"]
    (3, 51)
    """
    data = backends.of("payload", data).to_numpy_bytes(data)
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
