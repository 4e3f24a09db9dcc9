"""Test LloydMax against the optimum, and against levels fitted without bins."""

import struct

import numpy as np
import pytest
from codecs_table import gradient
from hypothesis import given, settings, strategies
from value_sections import ARRAYS, LARGEST, section_and_decoded

import deepreduce_hvd as dr
from deepreduce_hvd import container

BITS = (1, 2, 3, 4)


def levels_of(section):
    bits = section[0]
    return np.frombuffer(section, dtype="<f4", count=2 ** (bits - 1), offset=1)


def squared_error(values, decoded):
    return float(((values.astype(np.float64) - decoded) ** 2).sum())


def lloyd(magnitudes, levels):
    """Run Lloyd's method on the magnitudes themselves until nothing changes."""
    magnitudes = magnitudes.astype(np.float64)
    levels = levels.astype(np.float64)
    for _ in range(1000):
        nearest = np.abs(magnitudes[:, None] - levels).argmin(axis=1)
        found = [magnitudes[nearest == i] for i in range(levels.size)]
        better = np.array([part.mean() if part.size else old for part, old in zip(found, levels)])
        if (better == levels).all():
            break
        levels = better
    return float(((magnitudes - levels[nearest]) ** 2).sum())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("case", ["exponential", "normal", "largest", "heavy"])
def test_the_error_is_close_to_the_optimum(case, bits):
    draw = np.random.default_rng(4)
    values = {
        "exponential": draw.laplace(size=6000),
        "normal": draw.standard_normal(6000),
        "largest": np.sort(np.abs(draw.laplace(size=100_000)))[-3000:],
        "heavy": gradient(6000),
    }[case].astype(np.float32)
    section, decoded = section_and_decoded(dr.LloydMax(bits), values)
    best = lloyd(np.abs(values), levels_of(section))
    # a bin belongs to one level: the 8 levels of 4 bits are only a few bins apart
    assert squared_error(values, decoded) <= (1.35 if bits == 4 else 1.05) * best


def test_one_bit_is_the_sign_times_the_mean():
    values = gradient(5000)
    section, decoded = section_and_decoded(dr.LloydMax(1), values)
    mean = np.abs(values).mean(dtype=np.float64)
    assert levels_of(section)[0] == pytest.approx(mean, rel=1e-4)
    np.testing.assert_array_equal(decoded, np.copysign(levels_of(section)[0], values))


@settings(max_examples=150, deadline=None)
@given(ARRAYS, strategies.sampled_from(BITS))
def test_any_values(values, bits):
    """Levels are means of their values, so the error is never larger than the values."""
    section, decoded = section_and_decoded(dr.LloydMax(bits), values)
    if section is None:  # the section is larger than the values, which were sent instead
        return
    assert np.isfinite(decoded).all()
    assert (np.signbit(decoded) == np.signbit(values)).all()
    assert (np.diff(levels_of(section)) >= 0).all()
    energy = float((values.astype(np.float64) ** 2).sum())
    assert squared_error(values, decoded) <= energy * (1 + 1e-6) + values.size * 1e-89
    order = np.argsort(np.abs(values), kind="stable")
    assert (np.diff(np.abs(decoded[order])) >= 0).all(), "larger values get no smaller level"


@settings(max_examples=150, deadline=None)
@given(ARRAYS, strategies.sampled_from((3, 4)), strategies.data())
def test_zeros_stay_zeros(values, bits, data):
    """Then a parameter without a gradient does not move, such as a row for padding."""
    places = data.draw(strategies.lists(strategies.integers(0, 5000), min_size=1, max_size=40))
    zeros = [place % (values.size + 1) for place in places]
    values = np.insert(
        values, zeros, np.copysign(np.float32(0), data.draw(strategies.sampled_from((1, -1))))
    )
    section, decoded = section_and_decoded(dr.LloydMax(bits), values)
    assert not decoded[values == 0].any()
    if section is None:
        return
    assert levels_of(section)[0] == 0
    # a part of every gradient is sent, except of numbers that float32 can hardly tell from zero
    if np.abs(values).max() > 1e-38:
        assert decoded[np.abs(values).argmax()] != 0


def test_a_level_for_zeros_costs_little():
    values = np.random.default_rng(5).standard_normal(960).astype(np.float32)
    with_zero = values.copy()
    with_zero[7] = 0
    errors = [
        squared_error(one, section_and_decoded(dr.LloydMax(4), one)[1])
        / squared_error(one, 0 * one)
        for one in (values, with_zero)
    ]
    assert errors[0] < errors[1] < 2 * errors[0] < 0.05


@pytest.mark.parametrize("bits", BITS)
def test_equal_magnitudes_are_exact(bits):
    for magnitude in (np.float32(0.3), LARGEST, np.float32(1e-45), np.float32(0)):
        values = np.where(np.arange(77) % 3, magnitude, -magnitude).astype(np.float32)
        _, decoded = section_and_decoded(dr.LloydMax(bits), values)
        np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize("bits", BITS)
def test_the_order_of_values_and_the_key_do_not_matter(bits):
    values = gradient(4000)
    order = np.random.default_rng(1).permutation(values.size)
    section, decoded = section_and_decoded(dr.LloydMax(bits), values)
    other, shuffled = section_and_decoded(dr.LloydMax(bits), values[order])
    np.testing.assert_array_equal(levels_of(section), levels_of(other))
    np.testing.assert_array_equal(decoded[order], shuffled)
    assert dr.LloydMax(bits).encode(values, key=1)[0] == dr.LloydMax(bits).encode(values, key=2)[0]


@pytest.mark.parametrize("bits", BITS)
def test_size(bits):
    section, _ = section_and_decoded(dr.LloydMax(bits), gradient(4096))
    assert len(section) == 1 + 4 * 2 ** (bits - 1) + 4096 * bits // 8


@pytest.mark.parametrize("bits", BITS)
def test_without_values_the_section_is_empty(bits):
    assert dr.LloydMax(bits).encode(np.zeros(0, dtype=np.float32), key=0)[0] == b""
    assert dr.LloydMax.decode(b"", 0).size == 0
    data = container.write(container.Payload(9, 0, value_id=dr.LloydMax.stage_id, values=b"\x01"))
    with pytest.raises(dr.CorruptPayloadError):
        dr.decode(data)
    with pytest.raises(dr.CorruptPayloadError, match="expected 0 bytes, got 1"):
        dr.LloydMax.decode(b"\x01", 0)


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ((2.0, 1.0), "ascending order"),
        ((1.0, float("inf")), "finite"),
        ((float("nan"), 1.0), "finite"),
        ((-1.0, 1.0), "at least 0"),
        ((-0.0, 1.0), "at least 0"),
    ],
)
def test_levels_out_of_order_are_refused(levels, text):
    section, _ = section_and_decoded(dr.LloydMax(2), np.array([1, -2, 1], dtype=np.float32))
    assert section[1:9] == struct.pack("<ff", 1, 2)
    changed = section[:1] + struct.pack("<ff", *levels) + section[9:]
    data = container.write(container.Payload(3, 3, value_id=dr.LloydMax.stage_id, values=changed))
    with pytest.raises(dr.CorruptPayloadError, match=text):
        dr.decode(data)
    with pytest.raises(dr.CorruptPayloadError, match=text):
        dr.LloydMax.decode(changed, 3)


@pytest.mark.parametrize("bits", [0, 5, 2.0, True, "2"])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(dr.InvalidArgumentError, match="LloydMax bits: expected an integer of 1 to"):
        dr.LloydMax(bits)


def test_the_residual_keeps_what_levels_miss():
    values = gradient(3000)
    residual = np.zeros_like(values)
    codec = dr.Codec(dr.TopK(0.1), index=dr.Rice(), value=dr.LloydMax(1))
    sent = np.zeros_like(values)
    for step in range(50):
        sent += dr.decode(codec.encode(values, residual, step=step))
    np.testing.assert_allclose(sent + residual, 50 * values, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(residual) < 12 * np.linalg.norm(values)
