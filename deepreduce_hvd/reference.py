"""The complete encoder and decoder in NumPy.

The tests compare the native core with it (tests/conformance/test_conformance.py). Both write the
same bytes, but the native core is about a hundred times faster. Codecs with a custom stage run
here.
"""

from typing import Any

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.numerics import bits
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.numerics.random import Purpose, random_key
from deepreduce_hvd.stages import calls
from deepreduce_hvd.stages.base import IndexCodec, ValueCodec
from deepreduce_hvd.stages.memories.saturated import saturated_difference
from deepreduce_hvd.stages.registry import FIRST_USER_ID, find
from deepreduce_hvd.stages.value_codecs import BFloat16, Float16, RawValue

_KEPT = {"float16": Float16, "bfloat16": BFloat16}
#: {code of a gradient's dtype: the codec of a payload with all elements}
_DENSE_CODECS: dict[int, Any] = {
    code: _KEPT.get(name, RawValue) for name, code in container.DTYPES.items()
}


def encode(stages, gradient, dtype, state, seed=0, step=0, tensor=0, rank=0):
    """Encode one tensor.

    Args:
        stages: a tuple (sparsifier, index codec, value codec, memory).
        gradient: (d,) float32, converted from the gradient's dtype.
        dtype: the code of the gradient's dtype.
        state: the state arrays of the memory, (d,) float32 each.
        seed, step, tensor, rank: as for :meth:`Codec.encode`.

    Returns:
        A tuple (payload as uint8 array, new state).
    """
    sparsifier, index_codec, value_codec, memory = stages
    d = gradient.size
    if d > container.MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"gradient: expected at most {container.MAX_ELEMENTS} elements, got {d}; "
            "split the tensor"
        )
    if not np.isfinite(gradient).all():
        return container.write(container.Payload(d, 0, dtype, flags=container.NON_FINITE)), state
    accumulated, state = calls.accumulate(memory, gradient, state)

    # the rank is not part of the key, so a selection that ignores the data is the same on every
    # rank
    selected = calls.choose(
        sparsifier, accumulated, random_key(seed, step, tensor, 0, Purpose.SELECTION), step
    )
    result, sent, decoded = pack(
        index_codec,
        value_codec,
        selected,
        lambda at: accumulated[at],
        d,
        dtype,
        (seed, step, tensor, rank),
    )
    return container.write(result), calls.update(
        memory, gradient, accumulated, state, sent, decoded
    )


def pack(index_codec, value_codec, selected, elements, d, dtype, position):
    """Encode the elements of a tensor at the indices ``selected``.

    Args:
        index_codec, value_codec: the codecs.
        selected: (k,) uint32, ascending.
        elements: a function that returns the elements of the tensor at given indices.
        d: the number of elements of the tensor.
        dtype: the code of the gradient's dtype.
        position: a tuple (seed, step, tensor, rank).

    Returns:
        A tuple (Payload, indices (n,), decoded values (n,) at these indices).
    """
    seed, step, tensor, rank = position
    index_key = random_key(seed, step, tensor, rank, Purpose.BLOOM_POLICY)
    rounding_key = random_key(seed, step, tensor, rank, Purpose.ROUNDING)
    result = container.Payload(d, selected.size, dtype, value_id=value_codec.stage_id)
    sent, values = selected, elements(selected)
    everything = selected.size == d
    reorder_indices = not everything and value_codec.sorts and index_codec.any_order
    if not everything:
        result.index_id = index_codec.stage_id
        if not reorder_indices:
            result.index, sent, values_stay = calls.encode_indices(
                index_codec, selected, d, index_key, value_codec.bits_per_value()
            )
            if not values_stay:
                values = elements(sent)
            result.count = sent.size
    result.values, decoded, order = calls.encode_values(value_codec, values, rounding_key)
    if reorder_indices:
        result.index = calls.encode_in_order(
            index_codec, selected[order], d, index_key, value_codec.bits_per_value()
        )
        result.order = container.INDICES_IN_VALUE_ORDER
    elif value_codec.sorts:
        result.order_map = bits.pack_fields(order, bits.bit_width_of(order.size))
        result.order = container.PERMUTATION

    dense_codec = _DENSE_CODECS[dtype]()
    if result.total_bytes() > container.HEADER.size + d * dense_codec.bits_per_value() / 8:
        result = container.Payload(d, d, dtype, value_id=dense_codec.stage_id)
        sent = np.arange(d, dtype=np.uint32)
        result.values, decoded, _ = dense_codec.encode(elements(sent), rounding_key)
    return result, sent, decoded


def select(stages, gradient, state, given=None, seed=0, step=0, tensor=0):
    """Apply error feedback and selection, without encoding.

    Args:
        stages: a tuple (sparsifier, memory).
        given: ascending, distinct indices to take instead of the sparsifier's selection.
        gradient, state, seed, step, tensor: as for :func:`encode`.

    Returns:
        A tuple (indices, values, new state), or None if the gradient contains NaN or Inf.
    """
    sparsifier, memory = stages
    if not np.isfinite(gradient).all():
        return None
    accumulated, state = calls.accumulate(memory, gradient, state)
    indices = (
        calls.choose(
            sparsifier, accumulated, random_key(seed, step, tensor, 0, Purpose.SELECTION), step
        )
        if given is None
        else given
    )
    values = accumulated[indices]
    return indices, values, calls.update(memory, gradient, accumulated, state, indices, values)


def encode_sparse(stages, indices, values, d, dtype=0, seed=0, step=0, tensor=0, rank=0):
    """Encode a sparse tensor of ``d`` elements.

    Args:
        stages: a tuple (index codec, value codec).
        indices: (k,) uint32, ascending and distinct.
        values: (k,) float32.
        d: the number of elements of the dense tensor.
        dtype: the code of the gradient's dtype.
        seed, step, tensor, rank: as for :meth:`Codec.encode`.

    Returns:
        A tuple (payload, rest, (added indices, added rest)). ``rest`` is (k,) float32, each value
        minus its decoded value. The added elements are those that were not given but that the
        payload decodes to non-zero values.
    """
    nothing = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.float32)
    if not np.isfinite(values).all():
        return (
            container.write(container.Payload(d, 0, dtype, flags=container.NON_FINITE)),
            values,
            nothing,
        )
    dense = np.zeros(d, dtype=np.float32)
    dense[indices] = values
    index_codec, value_codec = stages
    position = seed, step, tensor, rank
    result, sent, decoded = pack(
        index_codec, value_codec, indices, lambda at: dense[at], d, dtype, position
    )
    lacks = dense.copy()
    lacks[sent] = saturated_difference(dense[sent], decoded)
    given = np.zeros(d, dtype=bool)
    given[indices] = True
    added = ~given[sent] & is_nonzero(decoded)
    return (
        container.write(result),
        lacks[indices],
        (sent[added].astype(np.uint32), lacks[sent[added]]),
    )


def decode_sparse(data, d=None):
    """Decode a payload to a sparse tensor.

    Args:
        data: the payload, a uint8 array.
        d: the expected number of elements, or None for any number.

    Returns:
        A tuple ((k,) uint32 ascending indices, (k,) float32 values), or None if the payload is
        non-finite.
    """
    parts = container.read(data)
    if d is not None and parts.d != d:
        raise InvalidArgumentError(f"payload: expected d = {d} elements, got {parts.d}")
    if parts.flags & container.NON_FINITE:
        return None
    value_codec = find(ValueCodec, parts.value_id)
    if (parts.order != container.ASCENDING) != value_codec.sorts:
        expected = "1 or 2" if value_codec.sorts else "0"
        raise CorruptPayloadError(
            f"payload order: expected {expected} for {value_codec.__name__} values, got "
            f"{parts.order}"
        )
    indices = np.arange(parts.d, dtype=np.uint32)
    if parts.index_id:
        index_codec = find(IndexCodec, parts.index_id)
        if parts.order == container.INDICES_IN_VALUE_ORDER and not index_codec.any_order:
            raise CorruptPayloadError(
                f"payload order: expected 0 or 1 for {index_codec.__name__} indices, got 2"
            )
        indices = index_codec.decode(parts.index, parts.d, parts.count)
        if parts.index_id >= FIRST_USER_ID:
            calls.expect_decoded(index_codec, indices, np.uint32, parts.count)
            in_order = np.sort(indices) if index_codec.any_order else indices
            calls.expect_ascending(f"{index_codec.__name__}.decode", in_order, parts.d)
        if index_codec.any_order and parts.order != container.INDICES_IN_VALUE_ORDER:
            wrong = np.flatnonzero(indices[1:] <= indices[:-1])
            if wrong.size:
                first, second = indices[wrong[0] : wrong[0] + 2]
                raise CorruptPayloadError(
                    f"index section: expected ascending indices for payload order {parts.order}, "
                    f"got {second} after {first}"
                )
    values = value_codec.decode(parts.values, parts.count)
    if parts.value_id >= FIRST_USER_ID:
        calls.expect_decoded(value_codec, values, np.float32, parts.count)
    if parts.order == container.PERMUTATION:
        order = bits.unpack_fields(
            parts.order_map, parts.count, bits.bit_width_of(parts.count), "order section"
        )
        if not np.array_equal(np.sort(order), np.arange(parts.count)):
            raise CorruptPayloadError(
                f"order section: expected a permutation of {parts.count} positions"
            )
        ordered = np.empty_like(values)
        ordered[order] = values
        values = ordered
    if parts.order == container.INDICES_IN_VALUE_ORDER:
        ascending = np.argsort(indices)
        indices, values = indices[ascending], values[ascending]
    return indices, values


def decode_sum(payloads, out, scale=1.0):
    """Add ``scale`` times each decoded payload to ``out`` (d,) float32, in the given order.

    A non-finite payload sets all of ``out`` to NaN.

    Returns:
        The largest magnitude of any result of an addition; NaN counts as the largest.
    """
    largest = 0.0
    for data in payloads:
        sent = decode_sparse(data, out.size)
        if sent is None:
            out[:] = largest = np.nan
        else:
            indices, values = sent
            with np.errstate(over="ignore"):
                out[indices] += np.float32(scale) * values
            # np.maximum returns NaN if either number is NaN
            largest = float(np.maximum(largest, np.abs(out[indices]).max(initial=0)))
    return largest
