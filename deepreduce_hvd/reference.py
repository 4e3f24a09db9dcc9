"""The complete encoder and decoder in NumPy.

The tests compare the native core with it (tests/conformance/test_conformance.py). Both write the
same bytes, but the native core is about a hundred times faster. Codecs with a custom stage run
here.
"""

from typing import Any

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.arrays import describe
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError
from deepreduce_hvd.numerics import bits
from deepreduce_hvd.numerics.exact_math import is_nonzero
from deepreduce_hvd.numerics.random import Purpose, random_key
from deepreduce_hvd.stages.base import IndexCodec, ValueCodec, is_built_in
from deepreduce_hvd.stages.memories.saturated import saturated_difference
from deepreduce_hvd.stages.registry import FIRST_USER_ID, find
from deepreduce_hvd.stages.sections import expect_encoded
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
    accumulated, state = accumulate(memory, gradient, state)

    # the rank is not part of the key, so a selection that ignores the data is the same on every
    # rank
    selected = choose(
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
    return container.write(result), update(memory, gradient, accumulated, state, sent, decoded)


def accumulate(memory, gradient, state):
    """Return (accumulated, new state) of a memory; check the result of a custom memory."""
    if is_built_in(memory):
        return memory.accumulate(gradient, state)
    returned = memory.accumulate(_read_only(gradient), tuple(map(_read_only, state)))
    if not isinstance(returned, tuple) or len(returned) != 2:
        _refuse(memory, "accumulate", "(what to select from, new state)", type(returned).__name__)
    accumulated, state = returned
    accumulated = _expect_float32(memory, "accumulate", accumulated, gradient.size)
    return accumulated, _expect_state(memory, "accumulate", state, gradient.size)


def update(memory, gradient, accumulated, state, indices, decoded):
    """Return the new state of a memory after ``decoded`` (k,) was sent at ``indices`` (k,).

    The result of a custom memory is checked.
    """
    if is_built_in(memory):
        return memory.update(gradient, accumulated, state, indices, decoded)
    # communicators still send ``indices`` and ``decoded``
    gradient, accumulated, indices, decoded = map(
        _read_only, (gradient, accumulated, indices, decoded)
    )
    new = memory.update(gradient, accumulated, tuple(map(_read_only, state)), indices, decoded)
    return _expect_state(memory, "update", new, gradient.size)


def choose(sparsifier, accumulated, key, step):
    """Return the sparsifier's selection; check the result of a custom sparsifier."""
    if is_built_in(sparsifier):
        return sparsifier.select(accumulated, key, step)
    indices = sparsifier.select(_read_only(accumulated), key, step)
    _expect_ascending(f"{type(sparsifier).__name__}.select", indices, accumulated.size)
    return indices


def _expect_ascending(what, indices, d):
    good = isinstance(indices, np.ndarray) and indices.dtype == np.uint32 and indices.ndim == 1
    if good and indices.size:
        good = (indices[1:] > indices[:-1]).all() and indices[-1] < d
    if not good:
        raise InvalidArgumentError(
            f"{what}: expected ascending distinct uint32 indices below {d}, got {indices!r}"
        )


def _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


def _refuse(memory, method, expected, got):
    raise InvalidArgumentError(f"{type(memory).__name__}.{method}: expected {expected}, got {got}")


def _expect_float32(memory, method, array, d):
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != (d,):
        _refuse(memory, method, f"float32 arrays of shape ({d},)", describe(array))
    if not np.isfinite(array).all():
        _refuse(
            memory,
            method,
            "finite numbers (saturated_sum of deepreduce_hvd.stages.memories.saturated stops at the"
            " largest)",
            "NaN or Inf",
        )
    return array


def _expect_state(memory, method, state, d):
    count = len(memory.state)
    if not isinstance(state, tuple) or len(state) != count:
        got = len(state) if isinstance(state, tuple) else type(state).__name__
        _refuse(memory, method, f"a tuple of {count} arrays ({', '.join(memory.state)})", got)
    return tuple(_expect_float32(memory, method, part, d) for part in state)


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
            result.index, sent, values_stay = _encoded_indices(
                index_codec, selected, d, index_key, value_codec.bits_per_value()
            )
            if not values_stay:
                values = elements(sent)
            result.count = sent.size
    result.values, decoded, order = _encoded_values(value_codec, values, rounding_key)
    if reorder_indices:
        given = selected[order]
        result.index, in_section, _ = _encoded(
            index_codec, given, d, index_key, value_codec.bits_per_value()
        )
        if not is_built_in(index_codec) and not np.array_equal(in_section, given):
            raise InvalidArgumentError(
                f"{type(index_codec).__name__}.encode: expected the given indices in the given"
                " order, because any_order = True, got others"
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


def _encoded(codec, *arguments):
    """Return what ``encode`` of a codec returns; check that of a custom codec."""
    if is_built_in(codec):
        return codec.encode(*arguments)
    kind = IndexCodec if isinstance(codec, IndexCodec) else ValueCodec
    if find(kind, codec.stage_id) is not type(codec):  # receivers decode with the new class
        raise InvalidArgumentError(
            f"{type(codec).__name__}: expected an object of the class that is registered now, got"
            " one that was made before the class was defined again; make a new Codec"
        )
    given = [_read_only(one) if isinstance(one, np.ndarray) else one for one in arguments]
    return expect_encoded(f"{type(codec).__name__}.encode", codec.encode(*given))


def _encoded_indices(codec, indices, d, *arguments):
    """Return (section, decoded indices, values_stay); check the result of a custom codec."""
    section, decoded, values_stay = _encoded(codec, indices, d, *arguments)
    if not is_built_in(codec):
        what = f"{type(codec).__name__}.encode"
        _expect_ascending(what, decoded, d)
        if values_stay and decoded.size != indices.size:
            raise InvalidArgumentError(
                f"{what}: expected as many decoded indices as were given, {indices.size}, because"
                f" values_stay is True, got {decoded.size}"
            )
    return section, decoded, values_stay


def _encoded_values(codec, values, key):
    """Return (section, decoded values, order); check the result of a custom codec."""
    section, decoded, order = _encoded(codec, values, key)
    if not is_built_in(codec):
        expected = [(decoded, np.float32)] + [(order, np.uint32)] * bool(codec.sorts)
        for array, dtype in expected:
            good = isinstance(array, np.ndarray) and array.dtype == dtype
            if not good or array.shape != values.shape:
                raise InvalidArgumentError(
                    f"{type(codec).__name__}.encode: expected a {dtype.__name__} array of shape "
                    f"{values.shape}, got {describe(array)}"
                )
        if not codec.sorts and order is not None:
            raise InvalidArgumentError(
                f"{type(codec).__name__}.encode: expected None as the order, because sorts = False,"
                f" got {describe(order)}"
            )
        if codec.sorts and not np.array_equal(np.sort(order), np.arange(values.size)):
            raise InvalidArgumentError(
                f"{type(codec).__name__}.encode: expected a permutation of {values.size} positions"
                " as the order, got another array"
            )
        if not np.isfinite(decoded).all():  # it would remain in the memory
            raise InvalidArgumentError(
                f"{type(codec).__name__}.encode: expected finite decoded values, got NaN or Inf"
            )
    return section, decoded, order


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
    accumulated, state = accumulate(memory, gradient, state)
    indices = (
        choose(sparsifier, accumulated, random_key(seed, step, tensor, 0, Purpose.SELECTION), step)
        if given is None
        else given
    )
    values = accumulated[indices]
    return indices, values, update(memory, gradient, accumulated, state, indices, values)


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


def _expect_decoded(codec, array, dtype, count):
    """Check what ``decode`` of a custom codec returned."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (count,):
        raise InvalidArgumentError(
            f"{codec.__name__}.decode: expected a {dtype.__name__} array of shape ({count},), got"
            f" {describe(array)}"
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
            _expect_decoded(index_codec, indices, np.uint32, parts.count)
            in_order = np.sort(indices) if index_codec.any_order else indices
            _expect_ascending(f"{index_codec.__name__}.decode", in_order, parts.d)
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
        _expect_decoded(value_codec, values, np.float32, parts.count)
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
