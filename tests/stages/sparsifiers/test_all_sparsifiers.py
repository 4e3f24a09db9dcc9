"""Test that sparsifiers with error feedback equal the NumPy classes at every SIMD level.

The sizes and the dtypes are not in the conformance suite.
"""

import numpy as np
import pytest
from codecs_table import MEMORIES, SIZES, SPARSIFIERS, gradient
from native_and_numpy import SIMD_LEVELS, sent
from sampling import parametrize_product

import deepreduce_hvd as dr
from deepreduce_hvd import _native


@parametrize_product(memory=MEMORIES, sparsifier=SPARSIFIERS)
def test_simd_levels_and_sizes_agree_with_the_oracle(sparsifier, memory):
    codec, memory = dr.Codec(SPARSIFIERS[sparsifier]), MEMORIES[memory]
    for d in SIZES:
        states = {"oracle": tuple(gradient(d, key=31) for _ in memory.state)}
        states.update((simd, states["oracle"]) for simd in SIMD_LEVELS)
        hints = dict.fromkeys(states, 0.0)
        for step in range(2):
            values = gradient(d, key=40 + step)
            expected, states["oracle"], _ = sent(
                codec, values, states["oracle"], memory, native=False, step=step
            )
            for simd in SIMD_LEVELS:
                got, states[simd], hints[simd] = sent(
                    codec, values, states[simd], memory, hints[simd], simd, step=step
                )
                assert got == expected, (d, simd, step)
                for array, oracle in zip(states[simd], states["oracle"]):
                    np.testing.assert_array_equal(array.view(np.uint32), oracle.view(np.uint32))


@parametrize_product(
    dtype=["float32", "float16", "float64", "bfloat16"], memory=MEMORIES, simd=SIMD_LEVELS
)
def test_dtypes(dtype, memory, simd):
    """Every float16 and bfloat16 value converts as in NumPy, and float64 near float32's limits."""
    memory = MEMORIES[memory]
    if dtype == "float16":
        values = np.arange(2**16, dtype=np.uint16).view(np.float16)
        values = values[np.isfinite(values)]
    elif dtype == "bfloat16":
        values = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
        values = values[np.isfinite(values)]
    else:
        values = np.concatenate(
            [gradient(9000), [1e-40, -1e-45, 3e38, -3.4028234e38, 0.0, -0.0]]
        ).astype(dtype)
        values = (
            np.concatenate([values, [1e-46, 1e-300, 1 + 2**-24, 1 + 2**-30]])
            if dtype == "float64"
            else values
        )
    state = tuple(gradient(values.size, key=13) for _ in memory.state)
    for sparsifier in (dr.TopK(0.05), dr.TopK(1.0), dr.NoneSparsifier(), dr.Threshold(0)):
        codec = dr.Codec(sparsifier)
        if dtype == "bfloat16":
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
            native_state = tuple(array.copy() for array in state)
            data, _, _ = _native.encode(
                codec.fields(memory),
                halves,
                2,
                *native_state,
                *[None] * (2 - len(state)),
                seed=1,
                tensor=3,
                rank=4,
                simd=simd,
            )
            native = data.tobytes()
        else:
            native, native_state, _ = sent(codec, values, state, memory, simd=simd)
        oracle, oracle_state, _ = sent(
            codec, values, state, memory, native=False, dtype=2 if dtype == "bfloat16" else None
        )
        assert native == oracle
        for array, expected in zip(native_state, oracle_state):
            np.testing.assert_array_equal(array.view(np.uint32), expected.view(np.uint32))


def test_the_native_core_refuses_an_unknown_sparsifier():
    fields = dr.Codec(dr.TopK(0.1)).fields(dr.NoMemory())
    fields[0] = 9
    with pytest.raises(dr.UnknownCodecError, match="sparsifier id: expected 0 to 4, got 9"):
        _native.encode(fields, gradient(100), 0)
