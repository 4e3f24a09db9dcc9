"""Compare whole payloads of the device codecs in the emulator with the native core.

This covers bytes, memories, sums, and refused payloads.
"""

import emulation
import numpy as np
import pytest
from codecs_table import INDEX, MEMORIES, SPARSIFIERS, VALUE, gradient, inputs
from hostile_payloads import expect_same_outcome, outcome, resealed, with_hostile_sections
from sampling import parametrize_product, parametrize_values
from test_stages import DEVICE_INDEX, DEVICE_VALUE

import deepreduce_hvd as dr
from deepreduce_hvd import _native, container
from deepreduce_hvd.numerics.random import random32, random_uniform
from deepreduce_hvd.numpy_backend import decode_sum_numpy

INPUTS = inputs()
#: name -> (dtype code, the float32 numbers as the dtype stores them)
DTYPES = {
    "float32": (0, lambda values: values),
    "float16": (
        1,
        lambda values: np.clip(values, -60000, 60000).astype(np.float16).view(np.uint16),
    ),
    "bfloat16": (2, lambda values: (values.view(np.uint32) >> 16).astype(np.uint16)),
    "float64": (3, lambda values: values.astype(np.float64)),
}
POSITION = {"seed": 1, "tensor": 3, "rank": 4}


def both(codec, memory, values, state, dtype="float32", step=2, misalignment=0):
    """Encode on the device and with the native core; return the payload and the state.

    Checks that bytes and state are equal.
    """
    code, store = DTYPES[dtype]
    stored = store(values)
    expected_state = tuple(array.copy() for array in state)
    no_state = [None] * (2 - len(state))
    expected = _native.encode(
        codec.fields(memory, step), stored, code, *expected_state, *no_state, step=step, **POSITION
    )[0]
    data, new_state, result = emulation.encode(
        codec, memory, stored, state, code, step=step, misalignment=misalignment, **POSITION
    )
    assert data.tobytes() == expected.tobytes()
    assert result.count == int.from_bytes(expected[16:20].tobytes(), "little")
    assert bool(result.non_finite) == bool(expected[5] & 1)
    for array, expected_array in zip(new_state, expected_state):
        np.testing.assert_array_equal(array.view(np.uint32), expected_array.view(np.uint32))
    return data, new_state


def expect_sum(codec, memory, payloads, d, scale=0.5, misalignments=(0,)):
    """Check that the sum of the payloads on the device equals that of the native core."""
    start = gradient(d, key=31)
    expected = decode_sum_numpy(payloads, start.copy(), scale)
    for misalignment in misalignments:
        got = emulation.decode_sum(
            codec, memory, payloads, start.copy(), scale, misalignment=misalignment
        )
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def fresh_state(memory, d):
    return tuple(
        gradient(d, key=11 + number) * np.float32(0.1) for number, _ in enumerate(memory.state)
    )


@parametrize_product(index=DEVICE_INDEX, value=DEVICE_VALUE, case=INPUTS)
def test_codecs(index, value, case):
    codec, memory, values = (
        dr.Codec(dr.TopK(0.05), index=INDEX[index], value=VALUE[value]),
        dr.Residual(),
        INPUTS[case],
    )
    data, _ = both(codec, memory, values, fresh_state(memory, values.size))
    expect_sum(codec, memory, [data], values.size, misalignments=emulation.MISALIGNMENTS)


@parametrize_product(sparsifier=SPARSIFIERS, memory=MEMORIES, case=INPUTS)
def test_sparsifiers_and_memories(sparsifier, memory, case):
    codec, memory, values = dr.Codec(SPARSIFIERS[sparsifier]), MEMORIES[memory], INPUTS[case]
    state = tuple(np.zeros_like(values) for _ in memory.state)
    for step in range(3):
        data, state = both(codec, memory, values, state, step=step)
    expect_sum(codec, memory, [data], values.size)


@parametrize_product(
    sparsifier=["topk", "topk_half", "random_k", "threshold", "chunk_topk", "none"],
    memory=MEMORIES,
    dtype=DTYPES,
    d=[1, 7, 1000, 20011],
)
def test_dtypes(sparsifier, memory, dtype, d):
    codec, memory = dr.Codec(SPARSIFIERS[sparsifier]), MEMORIES[memory]
    for misalignment in (0, 1, 3):
        data, _ = both(
            codec, memory, gradient(d), fresh_state(memory, d), dtype, misalignment=misalignment
        )
    expect_sum(codec, memory, [data], d)


@parametrize_values(
    sparsifier=["topk", "threshold_0", "random_k_all", "none", "chunk_topk_1"],
    value=DEVICE_VALUE,
    index=DEVICE_INDEX,
)
def test_all_elements_and_dense_fallback(sparsifier, value, index):
    codec = dr.Codec(SPARSIFIERS[sparsifier], index=INDEX[index], value=VALUE[value])
    for memory in (dr.NoMemory(), dr.LowPass(0.1), dr.MomentumCorrection()):
        for dtype in ("float32", "bfloat16"):
            data, _ = both(
                codec, memory, gradient(301) + np.float32(1), fresh_state(memory, 301), dtype
            )
            expect_sum(codec, memory, [data], 301)


@pytest.mark.parametrize("sparsifier", ["topk", "random_k", "threshold", "chunk_topk", "none"])
def test_any_schedule(sparsifier, schedule):
    codec, memory, values = (
        dr.Codec(SPARSIFIERS[sparsifier], index=dr.Bitmap()),
        dr.MomentumCorrection(),
        gradient(30000),
    )
    data, _ = both(codec, memory, values, fresh_state(memory, values.size))
    expect_sum(codec, memory, [data], values.size)


def deceptive(d):
    """Return inputs for which a sample predicts the k-th magnitude badly.

    The candidates of TopK do not contain it, or exceed their memory.
    """
    few = np.zeros(d, dtype=np.float32)
    few[:: d // 7] = gradient(few[:: d // 7].size) + 1
    ties = np.where(gradient(d) > 0, np.float32(2), np.float32(-2))
    alternating = np.where(np.arange(d) % 3 == 0, gradient(d) * np.float32(1e-3), np.float32(0.5))
    ends = np.concatenate([gradient(d // 2) * np.float32(1e-6), gradient(d - d // 2)])
    return {
        "few": few,
        "ties": ties,
        "alternating": alternating,
        "ends": ends,
        "equal": np.full(d, 3, dtype=np.float32),
    }


@parametrize_product(case=deceptive(16), k=[1, 100, 8191])
def test_largest_of_deceptive_inputs(case, k):
    d = 90001  # more than fit the memory for candidates
    both(
        dr.Codec(dr.TopK(k=k)), dr.Residual(), deceptive(d)[case], (np.zeros(d, dtype=np.float32),)
    )


def test_largest_where_the_sample_misleads():
    """The sample predicts a k-th magnitude that is far too large or far too small.

    So there are too few candidates, or too many for their memory.
    """
    d, k = 200000, 3000
    sampled = np.zeros(d, dtype=bool)
    samples = min(1 << 16, d // 16)
    numbers = np.arange(samples, dtype=np.uint64)
    starts, ends = numbers * d // samples, (numbers + 1) * d // samples
    draws = random32(0, np.arange(samples)).astype(np.uint64)
    sampled[(starts + (draws * (ends - starts) >> np.uint64(32))).astype(np.int64)] = True
    spread = np.exp2(20 * random_uniform(5, np.arange(d))).astype(np.float32)
    for large in (sampled, ~sampled):
        values = np.where(large, spread, -1 / spread)
        both(dr.Codec(dr.TopK(k=k)), dr.Residual(), values, (np.zeros(d, dtype=np.float32),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sparsifier", [dr.TopK(0.01), dr.Threshold(0.98), dr.ChunkTopK(chunk=300), dr.RandomK(0.001)]
)
def test_more_tiles_than_blocks(sparsifier):
    d = 17_500_000  # grids have at most 4096 blocks, with 4096 elements at a time
    codec, memory, values = dr.Codec(sparsifier, index=dr.Bitmap()), dr.Residual(), gradient(d)
    data, _ = both(codec, memory, values, (values[::-1] * np.float32(0.1),))
    expect_sum(codec, memory, [data], d)


@parametrize_product(
    sparsifier=["topk", "random_k", "threshold", "chunk_topk", "none"],
    place=[0, 500, 999],
    bad=[np.nan, np.inf, -np.inf],
)
def test_non_finite_leaves_the_memory(sparsifier, place, bad):
    codec = dr.Codec(SPARSIFIERS[sparsifier])
    for memory in MEMORIES.values():
        for dtype in DTYPES:
            values = gradient(1000)
            values[place] = bad
            if dtype == "float16":
                code, stored = 1, values.astype(np.float16).view(np.uint16)
            else:
                code, stored = DTYPES[dtype][0], DTYPES[dtype][1](values)
            state = fresh_state(memory, 1000)
            data, after, result = emulation.encode(codec, memory, stored, state, code)
            assert result.non_finite == 1 and result.count == 0
            assert (
                data.tobytes()
                == container.write(
                    container.Payload(1000, 0, code, flags=container.NON_FINITE)
                ).tobytes()
            )
            for before, now in zip(state, after):
                np.testing.assert_array_equal(before, now)
    assert np.isnan(
        emulation.decode_sum(codec, dr.NoMemory(), [data], np.zeros(1000, dtype=np.float32))
    ).all()


def test_double_beyond_float32_is_not_finite():
    values = np.full(10, 1e300)
    _, _, result = emulation.encode(dr.Codec(dr.TopK(0.5)), dr.NoMemory(), values, (), 3)
    assert result.non_finite == 1


def test_sum_in_the_order_of_ranks():
    d = 5000
    codec, memory = dr.Codec(dr.TopK(0.1), index=dr.Bitmap()), dr.NoMemory()
    payloads = [codec.encode(gradient(d, key=rank)) for rank in range(5)]
    payloads.append(dr.Codec(dr.NoneSparsifier()).encode(gradient(d, key=9)))
    payloads.append(dr.Codec(dr.NoneSparsifier(), value=dr.Float16()).encode(gradient(d, key=10)))
    for order in (payloads, payloads[::-1], []):
        expect_sum(codec, memory, order, d, scale=1 / 3)


def agree(codec, data, d):
    """Check that both sides refuse with the same error, or give the same sum.

    The device leaves payloads of other codecs to the host.
    """

    def on_device():
        return emulation.decode_sum(codec, dr.NoMemory(), [data], np.zeros(d, dtype=np.float32))

    if outcome(on_device) is dr.UnknownCodecError and (
        int(data[6]) not in (0, codec.index.stage_id) or int(data[7]) != codec.value.stage_id
    ):
        return
    expect_same_outcome(
        on_device, lambda: decode_sum_numpy([data], np.zeros(d, dtype=np.float32), 1.0)
    )


#: stride of the flipped bits; 11 meets each bit of a byte
STRIDES = [11, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", DEVICE_INDEX + DEVICE_VALUE)
def test_corruption(name, stride):
    d = 300
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    data = codec.encode(gradient(d))
    for length in range(data.size):
        with pytest.raises(dr.CorruptPayloadError):
            emulation.decode_sum(
                codec, dr.NoMemory(), [data[:length]], np.zeros(d, dtype=np.float32)
            )
    for bit in range(0, 8 * data.size, stride):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(dr.CorruptPayloadError):
            emulation.decode_sum(codec, dr.NoMemory(), [flipped], np.zeros(d, dtype=np.float32))
        agree(codec, resealed(flipped), d)


@pytest.mark.parametrize("name", DEVICE_INDEX + DEVICE_VALUE)
def test_hostile_sections(name):
    d = 300
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    for hostile in with_hostile_sections(codec.encode(gradient(d))):
        agree(codec, hostile, d)


@pytest.mark.parametrize("value", [dr.RawValue(), dr.Float16(), dr.BFloat16()])
def test_corrupt_dense_payloads(value):
    d = 20
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    data = codec.encode(gradient(d))
    for bit in range(8 * data.size):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        agree(codec, resealed(flipped), d)


def test_a_refused_payload_is_told_and_those_before_it_are_summed():
    d = 1000
    codec, memory = dr.Codec(dr.TopK(0.1)), dr.NoMemory()
    good = [codec.encode(gradient(d, key=rank)) for rank in range(3)]
    bad = good[1].copy()
    bad[-1] ^= 1
    out = np.zeros(d, dtype=np.float32)
    with pytest.raises(dr.CorruptPayloadError, match="checksum"):
        emulation.decode_sum(codec, memory, [good[0], bad, good[2]], out)
    np.testing.assert_array_equal(out, dr.decode(good[0]))


@pytest.mark.parametrize(
    "codec, d, error, text",
    [
        (dr.Codec(dr.TopK(0.1), index=dr.Huffman()), 10, dr.UnknownCodecError, "no CUDA kernels"),
        (dr.Codec(dr.TopK(0.1), value=dr.Deflate()), 10, dr.UnknownCodecError, "no CUDA kernels"),
    ],
)
def test_what_stays_on_the_host_is_refused(codec, d, error, text):
    with pytest.raises(error, match=text):
        emulation.encode(codec, dr.NoMemory(), gradient(d), (), 0)


def test_wrong_number_of_elements():
    codec = dr.Codec(dr.TopK(0.1))
    with pytest.raises(dr.InvalidArgumentError, match="expected d = 99 elements, got 100"):
        emulation.decode_sum(
            codec, dr.NoMemory(), [codec.encode(gradient(100))], np.zeros(99, dtype=np.float32)
        )
