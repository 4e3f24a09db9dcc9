"""Test QSGD, LloydMax, FitPoly and FitDExp in the emulator, on edge cases of their kernels.

Results must equal the NumPy oracle bit for bit.
"""

import emulation
import numpy as np
import pytest
from codecs_table import gradient
from hostile_payloads import expect_same_outcome
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as numpy_strategies
from sampling import parametrize_product, parametrize_values
from test_stages import KEY, expect_oracle, hostile

import deepreduce_hvd as dr

FITS = [
    dr.FitPoly(),
    dr.FitPoly(degree=1),
    dr.FitPoly(degree=7),
    dr.FitPoly(segments=3),
    dr.FitPoly(segments=1024),
    dr.FitDExp(),
]
QSGDS = [
    dr.QSGD(bits=bits, bucket=bucket, norm=norm)
    for bits in (1, 3, 8)
    for bucket in (8, 24, 504, 32768)
    for norm in ("max", "l2")
]
LLOYD_MAXES = [dr.LloydMax(bits=bits) for bits in (1, 2, 3, 4)]
QUANTIZERS = QSGDS + LLOYD_MAXES
IDS = repr
LARGEST = np.finfo(np.float32).max


def plateaus(d):
    """Return few distinct values, so that many points have the same distance from their chords."""
    return np.repeat(np.arange(d // 16, 0, -1, dtype=np.float32), 16)[:d]


def staircase(d):
    """Return steps, each half as high and twice as long as the previous one.

    So every cut leaves the rest on one side.
    """
    return np.exp2(-np.floor(np.log2(np.arange(1, d + 1)))).astype(np.float32)


def zigzag(d):
    """Return two equal halves, so that every distance in the tree occurs twice."""
    half = np.sort(np.abs(gradient(d // 2)))[::-1]
    return np.concatenate([half + 1, half])


SHAPES = {
    "heavy_tailed": gradient,
    "plateaus": plateaus,
    "staircase": staircase,
    "zigzag": zigzag,
    "geometric": lambda d: np.float32(0.99) ** np.arange(d, dtype=np.float32),
    "line": lambda d: np.arange(d, 0, -1, dtype=np.float32),
    "reciprocal": lambda d: (
        (1 / np.arange(1, d + 1)).astype(np.float32)
        * np.where(np.arange(d) % 3, 1, -1).astype(np.float32)
    ),
    "all_exponents": lambda d: np.ldexp(1.0, np.arange(d) % 270 - 145).astype(np.float32),
    "one_far": lambda d: np.where(np.arange(d) == 5, LARGEST, gradient(d)).astype(np.float32),
    "largest": lambda d: np.full(d, LARGEST, dtype=np.float32),
    "negative_zeros": lambda d: np.where(np.arange(d) % 2, np.float32(-0.0), gradient(d)).astype(
        np.float32
    ),
}


@parametrize_product(stage=FITS, shape=SHAPES, d=[2, 5, 31, 2500])
def test_fit_of_shapes(stage, shape, d):
    expect_oracle(stage, SHAPES[shape](d))


@parametrize_values(
    stage=FITS, d=[1, 2, 3, 4, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 40000]
)
def test_fit_of_sizes(stage, d):
    expect_oracle(stage, gradient(d), spare=d % 3 * 1000)
    expect_oracle(stage, np.abs(gradient(d, key=3)))


@pytest.mark.parametrize("stage", [dr.FitPoly(), dr.FitPoly(segments=200), dr.FitDExp()], ids=IDS)
def test_fit_in_any_schedule(stage, schedule):
    expect_oracle(stage, gradient(12000))
    expect_oracle(stage, staircase(3000))


@parametrize_product(degree=[1, 5], shape=["plateaus", "all_exponents"])
def test_more_cuts_than_rounds_look_ahead(degree, shape):
    """These trees are deeper than the number of rounds.

    The block that chooses the cuts computes the rest.
    """
    section = expect_oracle(dr.FitPoly(degree=degree, segments=1024), SHAPES[shape](2500))
    assert int.from_bytes(section[4:6], "little") > 100


@settings(max_examples=60, deadline=None)
@given(
    numpy_strategies.arrays(
        np.float32,
        strategies.integers(0, 200),
        elements=strategies.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    strategies.sampled_from(FITS + QUANTIZERS),
)
def test_any_finite_values(values, stage):
    expect_oracle(stage, values)


@parametrize_product(stage=QUANTIZERS, d=[0, 1, 7, 8, 9, 503, 504, 505, 2047, 2048, 2049, 40000])
def test_quantizers_of_sizes(stage, d):
    expect_oracle(stage, gradient(d), spare=d % 3 * 1000)


@pytest.mark.parametrize("stage", QUANTIZERS, ids=IDS)
def test_quantizers_in_any_schedule(stage, schedule):
    expect_oracle(stage, gradient(5000))


@parametrize_product(
    stage=QUANTIZERS, shape=["largest", "negative_zeros", "all_exponents", "one_far"]
)
def test_quantizers_of_shapes(stage, shape):
    expect_oracle(stage, SHAPES[shape](1000))


@pytest.mark.parametrize(
    "values",
    [gradient(40), np.abs(gradient(9)), -np.abs(gradient(3)), gradient(200)],
    ids=lambda values: f"d{values.size}",
)
@pytest.mark.parametrize(
    "stage",
    [
        dr.FitPoly(degree=1, segments=5),
        dr.FitPoly(degree=3, segments=2),
        dr.FitDExp(),
        dr.QSGD(bits=3, bucket=16),
        dr.LloydMax(bits=1),
        dr.LloydMax(bits=3),
    ],
    ids=IDS,
)
def test_hostile_sections(stage, values):
    section = stage.encode(values, KEY)[0]
    for changed in hostile(section):
        expect_same_outcome(
            lambda: emulation.decode_value(stage, changed, values.size),
            lambda: stage.decode(changed, values.size),
        )


@settings(max_examples=150, deadline=None)
@given(strategies.data())
def test_hostile_heads(data):
    """Test random headers, valid or out of range, with sections of matching or close length."""
    count = data.draw(strategies.integers(1, 3000))
    positives = data.draw(strategies.sampled_from([0, 1, count // 2, count, count + 1]))
    degree = data.draw(strategies.integers(0, 8))
    segments = [
        data.draw(strategies.sampled_from([0, 1, 2, 3, min(max(n, 0), 1024), 1025]))
        for n in (positives, count - positives)
    ]
    exponents = [
        data.draw(strategies.sampled_from([-153, -152, -20, 0, 160, 161])) if n else 0
        for n in (positives, count - positives)
    ]
    widths = [data.draw(strategies.sampled_from([0, 1, 11, 32, 33])) for _ in range(degree + 2)]
    fields = sum(max(n - 1, 0) for n in segments) * widths[0] + sum(segments) * sum(widths[1:])
    head = positives.to_bytes(4, "little") + b"".join(n.to_bytes(2, "little") for n in segments)
    head += b"".join((n & 0xFFFF).to_bytes(2, "little") for n in exponents) + bytes(
        [degree, *widths]
    )
    size = max((fields + 7) // 8 + data.draw(strategies.sampled_from([-1, 0, 0, 0, 1])), 0)
    body = np.random.default_rng(data.draw(strategies.integers(0, 99))).integers(
        0, 256, size, dtype=np.uint8
    )
    body &= data.draw(strategies.sampled_from([0, 1, 255]))
    if fields % 8 and body.size:
        body[-1] &= (1 << fields % 8) - 1
    section = head + body.tobytes()
    stage = dr.FitPoly()
    expect_same_outcome(
        lambda: emulation.decode_value(stage, section, count), lambda: stage.decode(section, count)
    )
