"""Test what every codec must do, for every row of tests/support/codecs_table.py.

The native core is compared with the NumPy oracle, and both with the contract.
"""

import pathlib

import numpy as np
import pytest
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE, gradient, inputs
from hostile_payloads import resealed, with_hostile_sections
from native_and_numpy import SIMD_LEVELS, agree, both, dense
from sampling import parametrize_product, parametrize_values

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import encode_numpy

GOLDEN = pathlib.Path(__file__).parent / "golden" / "v1"
INPUTS = inputs()


@parametrize_product(index=INDEX, value=VALUE, case=INPUTS)
def test_native_equals_oracle(index, value, case):
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
    values = INPUTS[case]
    data, _ = both(codec, dr.Residual(), values, (gradient(values.size, key=11) * np.float32(0.1),))
    decoded = dense(data, values.size)
    np.testing.assert_array_equal(
        decoded.view(np.uint32), dense(data, values.size, native=False).view(np.uint32)
    )
    for simd in SIMD_LEVELS:
        again, _ = encode_numpy(
            codec,
            dr.Residual(),
            values,
            (gradient(values.size, key=11) * np.float32(0.1),),
            0.0,
            1,
            2,
            3,
            4,
            simd=simd,
        )
        assert again.tobytes() == data.tobytes(), f"SIMD level {simd} makes other bytes"
        np.testing.assert_array_equal(dense(data, values.size, simd=simd), decoded)
    info = dr.inspect(data)
    assert info["total_bytes"] == data.size
    assert data.size <= container.HEADER.size + 4 * values.size, (
        "a payload larger than dense must go dense"
    )


@parametrize_product(memory=MEMORIES, sparsifier=SPARSIFIERS, case=INPUTS)
def test_sparsifier_and_memory(sparsifier, memory, case):
    codec = dr.Codec(SPARSIFIERS[sparsifier])
    memory = MEMORIES[memory]
    values = INPUTS[case]
    state = tuple(np.zeros_like(values) for _ in memory.state)
    for step in range(3):
        _, state = both(codec, memory, values, state, step=step)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("index", INDEX)
def test_gradient_dtypes(index, dtype):
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index])
    data, _ = both(
        codec, dr.Residual(), gradient(1000).astype(dtype), (np.zeros(1000, dtype=np.float32),)
    )
    assert dr.inspect(data)["dtype"] == dtype


@parametrize_values(index=INDEX, value=VALUE)
def test_mass_balance(index, value):
    """What is sent plus what is kept equals the input, for every codec, also for lossy ones."""
    codec = dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value])
    values = gradient(5000)
    residual = np.zeros_like(values)
    sent = np.zeros(5000)
    rounding = 0.0
    for step in range(5):
        data = codec.encode(values, residual, step=step)
        decoded = dr.decode(data).astype(np.float64)
        sent += decoded
        # one addition and one subtraction, each rounded to float32
        accumulated = np.abs(residual + decoded).max()
        rounding += 2.0**-24 * (accumulated + np.abs(residual).max())
    np.testing.assert_allclose(sent + residual, 5.0 * values, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", [*INDEX, *VALUE])
def test_golden(name):
    """The bytes never change: golden files are written once per version of the format."""
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    data, _ = both(codec, dr.NoMemory(), gradient(300), ())
    path = GOLDEN / f"{name}.hex"
    assert path.exists(), (
        f"no golden file {path}; make it with `python tests/support/make_golden.py`"
    )
    assert data.tobytes().hex() == "".join(path.read_text().split())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_reaches_everyone_and_leaves_the_residual(bad):
    values = gradient(1000)
    values[371] = bad
    before = gradient(1000, key=5)
    codec = dr.Codec(dr.TopK(0.01))
    data, (residual,) = both(codec, dr.Residual(), values, (before,))
    np.testing.assert_array_equal(residual, before)
    assert np.isnan(dr.decode(data)).all()


#: stride of the flipped bits; 7 meets each bit of a byte
STRIDES = [7, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", [*INDEX, *VALUE])
def test_corruption(name, stride):
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    data = codec.encode(gradient(300))
    for length in range(data.size):
        with pytest.raises(dr.CorruptPayloadError):
            dense(data[:length], 300)
    for bit in range(0, data.size * 8, stride):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(dr.CorruptPayloadError):
            dense(flipped, 300)
        agree(resealed(flipped), 300)


@pytest.mark.parametrize("name", [*INDEX, *VALUE])
def test_hostile_sections(name):
    """Sections are cut, extended and overwritten, with a valid header and checksum."""
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    for hostile in with_hostile_sections(codec.encode(gradient(300))):
        agree(hostile, 300)
