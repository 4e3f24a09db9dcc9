"""Compare each stage of the device codecs alone, in the emulator, with the NumPy oracle.

This covers sections, decoded arrays, and refused sections.
"""

import emulation
import numpy as np
import pytest
from codecs_table import INDEX, VALUE, gradient, inputs, on_device
from hostile_payloads import expect_same_outcome
from sampling import parametrize_product

import deepreduce_hvd as dr

DEVICE_INDEX, DEVICE_VALUE = on_device(INDEX), on_device(VALUE)

INPUTS = inputs()
KEY = 0x0123456789ABCDEF


def selected(values):
    """Return ascending indices of about one element in 10, as a sparsifier may select them."""
    k = max(1, values.size // 10) if values.size else 0
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:k]).astype(np.uint32)


@parametrize_product(name=DEVICE_INDEX, case=INPUTS, spare=[0, 1000])
def test_index(name, case, spare):
    stage, d = INDEX[name], INPUTS[case].size
    indices = selected(INPUTS[case])
    expected, expected_decoded, expected_stay = stage.encode(indices, d, KEY, 20.0)
    section, decoded, stay = emulation.encode_index(stage, indices, d, KEY, 20.0, spare=spare)
    assert section == expected
    np.testing.assert_array_equal(decoded, expected_decoded)
    # on the device only the stage checks it
    assert stay == expected_stay or not indices.size
    for misalignment in emulation.MISALIGNMENTS:
        back = emulation.decode_index(
            stage, section, d, decoded.size, misalignment=misalignment, spare=spare
        )
        np.testing.assert_array_equal(back, decoded)


@pytest.mark.parametrize("name", DEVICE_INDEX)
def test_index_in_any_schedule(name, schedule):
    stage, values = INDEX[name], gradient(9000)
    indices = selected(values)
    section, decoded, _ = emulation.encode_index(stage, indices, values.size, KEY)
    assert section == stage.encode(indices, values.size, KEY)[0]
    np.testing.assert_array_equal(
        emulation.decode_index(stage, section, values.size, decoded.size), decoded
    )


def expect_oracle(stage, values, spare=0, misalignments=(1,)):
    """Check encoding and decoding against the oracle; return the section."""
    expected, expected_decoded, expected_order = stage.encode(values, KEY)
    section, decoded, order = emulation.encode_value(stage, values, KEY, spare=spare)
    assert section == expected
    np.testing.assert_array_equal(decoded.view(np.uint32), expected_decoded.view(np.uint32))
    if stage.sorts:
        np.testing.assert_array_equal(order, expected_order)
    sent = stage.decode(section, values.size)
    for misalignment in misalignments:
        back = emulation.decode_value(
            stage, section, values.size, misalignment=misalignment, spare=spare
        )
        np.testing.assert_array_equal(back.view(np.uint32), sent.view(np.uint32))
    return section


@parametrize_product(name=DEVICE_VALUE, case=INPUTS, spare=[0, 1000])
def test_value(name, case, spare):
    expect_oracle(VALUE[name], INPUTS[case], spare, emulation.MISALIGNMENTS)


@pytest.mark.parametrize("name", DEVICE_VALUE)
def test_value_in_any_schedule(name, schedule):
    expect_oracle(VALUE[name], gradient(9000))


def hostile(section):
    """Yield damaged sections: cut, extended, overwritten, or with flipped bits.

    Each bit is flipped, alone and together with the last bit.
    """
    for bit in range(8 * len(section)):
        flipped = bytearray(section)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
        flipped[-1] ^= 0x80
        yield bytes(flipped)
    yield from (section[:length] for length in range(len(section)))
    yield from (section + b"\0", section + section, b"\xff" * len(section), b"\0" * len(section))


@parametrize_product(name=DEVICE_INDEX, d=[31, 300])
def test_hostile_index_sections(name, d):
    stage = INDEX[name]
    section, decoded, _ = stage.encode(selected(gradient(d)), d, KEY)

    def check(changed, count):
        try:
            emulation.decode_index(stage, changed, d, count)
        except dr.UnknownCodecError:  # left to the host: another random policy
            assert name.startswith("bloom") and changed[0] in (2, 4) and changed[0] != section[0]
            return
        except dr.CorruptPayloadError:
            pass
        expect_same_outcome(
            lambda: emulation.decode_index(stage, changed, d, count),
            lambda: stage.decode(changed, d, count),
        )

    for changed in hostile(section):
        check(changed, decoded.size)
    for count in (0, 1, decoded.size - 1, decoded.size + 1, d - 1, d):
        check(section, count)
        check(b"", count)


@pytest.mark.parametrize("name", DEVICE_VALUE)
def test_hostile_value_sections(name):
    stage, values = VALUE[name], gradient(30)
    section = stage.encode(values, KEY)[0]
    for changed in hostile(section):
        expect_same_outcome(
            lambda: emulation.decode_value(stage, changed, values.size),
            lambda: stage.decode(changed, values.size),
        )
    for count in (0, 1, values.size - 1, values.size + 1, 300):
        expect_same_outcome(
            lambda: emulation.decode_value(stage, section, count),
            lambda: stage.decode(section, count),
        )
        expect_same_outcome(
            lambda: emulation.decode_value(stage, b"", count), lambda: stage.decode(b"", count)
        )


@pytest.mark.parametrize("name", DEVICE_INDEX + DEVICE_VALUE)
def test_inactive_sections_are_not_looked_at(name):
    if name in INDEX:
        emulation.decode_index(INDEX[name], b"\xff" * 50, 300, 10, active=False)
    else:
        emulation.decode_value(VALUE[name], b"\xff" * 50, 10, active=False)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 255, 256, 257, 5000])
def test_order(count):
    order = np.random.default_rng(count).permutation(count).astype(np.uint32)
    width = (count - 1).bit_length() if count > 1 else 0
    bits = (order[:, None] >> np.arange(width, dtype=np.uint32) & 1).astype(np.uint8)
    section = np.packbits(bits.ravel(), bitorder="little").tobytes()
    for spare in (0, 100):
        assert emulation.encode_order(order, spare=spare) == section
        np.testing.assert_array_equal(emulation.decode_order(section, count, spare=spare), order)


@pytest.mark.parametrize("count", [3, 30])
def test_hostile_order(count):
    order = np.random.default_rng(count).permutation(count).astype(np.uint32)
    section = emulation.encode_order(order)
    for changed in hostile(section):
        if changed != section:
            with pytest.raises(dr.CorruptPayloadError):
                emulation.decode_order(changed, count)
