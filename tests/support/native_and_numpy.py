"""Encode and decode with the native core and with the NumPy classes, which must agree."""

import numpy as np
from hostile_payloads import expect_same_outcome

import deepreduce_hvd as dr
from deepreduce_hvd import _native
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy

SIMD_LEVELS = range(_native.simd_level() + 1)


def sent(
    codec, values, state=(), memory=None, threshold=0.0, simd=-1, native=True, dtype=None, step=0
):
    """Return (bytes of the payload, new state, next threshold) without changing ``state``."""
    state = tuple(array.copy() for array in state)
    memory = memory or (dr.Residual() if state else dr.NoMemory())
    data, threshold = encode_numpy(
        codec,
        memory,
        values,
        state,
        threshold,
        1,
        step,
        3,
        4,
        native=native,
        simd=simd,
        dtype=dtype,
    )
    return data.tobytes(), state, threshold


def selected(payload):
    return dr.decode_sum_sparse(
        [np.frombuffer(payload, dtype=np.uint8)],
        dr.inspect(np.frombuffer(payload, dtype=np.uint8))["d"],
    )


def largest(values, k):
    """Return the k largest elements: sort by decreasing magnitude, then by index; drop zeros.

    The result is ascending.
    """
    order = np.lexsort((np.arange(values.size), -np.abs(values)))[:k]
    return np.sort(order[values[order] != 0])


def both(codec, memory, values, state, **position):
    """Encode with the native core and the oracle; return the results of the core.

    Checks that bytes and state are equal.
    """
    position = {"seed": 1, "step": 2, "tensor": 3, "rank": 4, **position}
    results = []
    for native in (True, False):
        copies = tuple(array.copy() for array in state)
        data, _ = encode_numpy(codec, memory, values, copies, 0.0, native=native, **position)
        results.append((data, copies))
    (native_data, native_state), (oracle_data, oracle_state) = results
    assert native_data.tobytes() == oracle_data.tobytes()
    for native_array, oracle_array in zip(native_state, oracle_state):
        np.testing.assert_array_equal(native_array.view(np.uint32), oracle_array.view(np.uint32))
    return native_data, native_state


def dense(data, d, native=True, simd=-1):
    return decode_sum_numpy([data], np.zeros(d, dtype=np.float32), 1.0, native=native, simd=simd)


def agree(data, d):
    """Check that native decoder and oracle give the same result or error for hostile bytes."""
    expect_same_outcome(lambda: dense(data, d, native=True), lambda: dense(data, d, native=False))
