"""Call the methods of stages, and check what those of custom stages return.

Custom stages get views that they cannot write to. A wrong result would be sent, or stay in the
memory for good, so it is refused, with the name of the class.
"""

import numpy as np

from deepreduce_hvd.arrays import describe
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.base import IndexCodec, ValueCodec, is_built_in
from deepreduce_hvd.stages.registry import find
from deepreduce_hvd.stages.sections import expect_encoded


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


def put_back(memory, state, indices, values):
    """Return values (k,) that were taken at ``indices`` (k,) to the state of a memory."""
    returned = memory.put_back(state, indices, values)
    if returned is not None:
        expected = "None, because it changes the state in place"
        _refuse(memory, "put_back", expected, type(returned).__name__)


def choose(sparsifier, accumulated, key, step):
    """Return the sparsifier's selection; check the result of a custom sparsifier."""
    if is_built_in(sparsifier):
        return sparsifier.select(accumulated, key, step)
    indices = sparsifier.select(_read_only(accumulated), key, step)
    expect_ascending(f"{type(sparsifier).__name__}.select", indices, accumulated.size)
    return indices


def encode_indices(codec, indices, d, *arguments):
    """Return (section, decoded indices, values_stay); check the result of a custom codec."""
    section, decoded, values_stay = _encoded(codec, indices, d, *arguments)
    if not is_built_in(codec):
        what = f"{type(codec).__name__}.encode"
        expect_ascending(what, decoded, d)
        if values_stay and decoded.size != indices.size:
            raise InvalidArgumentError(
                f"{what}: expected as many decoded indices as were given, {indices.size}, because"
                f" values_stay is True, got {decoded.size}"
            )
    return section, decoded, values_stay


def encode_in_order(codec, indices, *arguments):
    """Return the section of indices in any order; check that a custom codec keeps the order."""
    section, decoded, _ = _encoded(codec, indices, *arguments)
    if not is_built_in(codec) and not np.array_equal(decoded, indices):
        raise InvalidArgumentError(
            f"{type(codec).__name__}.encode: expected the given indices in the given order, because"
            " any_order = True, got others"
        )
    return section


def encode_values(codec, values, key):
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


def expect_decoded(codec, array, dtype, count):
    """Check what ``decode`` of a custom codec returned."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (count,):
        raise InvalidArgumentError(
            f"{codec.__name__}.decode: expected a {dtype.__name__} array of shape ({count},), got"
            f" {describe(array)}"
        )


def expect_ascending(what, indices, d):
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
    # a part that stays as it was is the view that the memory was given
    return tuple(
        np.require(_expect_float32(memory, method, part, d), requirements="W") for part in state
    )
