"""Test the curve-fitting value codecs.

They are compared with independent fits, and tested for the pitfalls of published code.
"""

import numpy as np
import pytest
from codecs_table import gradient
from fitted_values import FITS, native_and_oracle, relative_error
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as numpy_strategies
from numpy.polynomial import chebyshev
from scipy.optimize import curve_fit
from scipy.special import eval_legendre

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.numerics import exact_math
from deepreduce_hvd.numpy_backend import decode_sum_numpy, encode_numpy
from deepreduce_hvd.stages.value_codecs import fit_poly
from deepreduce_hvd.stages.value_codecs.fit_sides import sort_sides

LARGEST = np.finfo(np.float32).max


def heavy_tailed(name, count, seed=0):
    """Return the largest 1 % of ``100 count`` samples, (count,) float32."""
    random = np.random.default_rng(seed)
    samples = {
        "laplace": lambda n: random.laplace(size=n),
        "student": lambda n: random.standard_t(3, n),
        "normal": lambda n: random.standard_normal(n),
        "lognormal": lambda n: np.exp(2 * random.standard_normal(n)) * random.choice([-1, 1], n),
    }[name](100 * count)
    largest = np.argpartition(np.abs(samples), samples.size - count)[samples.size - count :]
    return (1e-3 * samples[np.sort(largest)]).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    numpy_strategies.arrays(
        np.float32,
        strategies.integers(0, 200),
        elements=strategies.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    strategies.sampled_from(FITS),
)
def test_any_finite_values(values, value):
    """For any floats both implementations agree; decoded values are finite, with the same sign."""
    _, decoded = native_and_oracle(value, values)
    assert np.isfinite(decoded).all()
    assert not (np.signbit(decoded) != np.signbit(values))[(decoded != 0) & (values != 0)].any()


@pytest.mark.parametrize("simd", [0, 1, 2])
@pytest.mark.parametrize("value", FITS, ids=repr)
@pytest.mark.parametrize("name", ["laplace", "lognormal"])
def test_large_inputs_agree_at_every_simd_level(name, value, simd):
    values = heavy_tailed(name, 30011)
    codec = dr.Codec(dr.NoneSparsifier(), value=value)
    native, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4, simd=simd)
    oracle, _ = encode_numpy(codec, dr.NoMemory(), values, (), 0.0, 1, 2, 3, 4, native=False)
    assert native.tobytes() == oracle.tobytes()
    decoded = decode_sum_numpy([native], np.zeros(values.size, dtype=np.float32), 1.0, simd=simd)
    np.testing.assert_array_equal(
        decoded,
        decode_sum_numpy([native], np.zeros(values.size, dtype=np.float32), 1.0, native=False),
    )


@pytest.mark.parametrize("degree", [1, 2, 5, 7])
@pytest.mark.parametrize("name", ["laplace", "student", "normal", "lognormal"])
def test_error_is_that_of_independent_least_squares(name, degree):
    """The error is at most 1.001 times that of NumPy's least squares on the same knots."""
    values = heavy_tailed(name, 5000)
    _, sides = sort_sides(values)
    squared = 0.0
    for y in sides:
        for start, end in fit_poly.find_segments(y, fit_poly.choose_segments(y, degree), degree):
            x = np.linspace(-1, 1, end - start)
            best = chebyshev.chebval(x, chebyshev.chebfit(x, y[start:end], degree))
            squared += ((best - y[start:end]) ** 2).sum()
    _, decoded = native_and_oracle(dr.FitPoly(degree=degree), values)
    ours = np.linalg.norm(decoded.astype(np.float64) - values)
    rounding = np.linalg.norm(values.astype(np.float64)) * 2.0**-24
    assert ours <= 1.001 * np.sqrt(squared) + rounding


def test_gram_basis_is_orthonormal_and_tends_to_legendre():
    for n in (8, 9, 100, 4096):
        identity = np.array(
            [fit_poly.fit_segment(fit_poly.evaluate(row, n), 7) for row in np.eye(8)]
        )
        np.testing.assert_allclose(identity, np.eye(8), atol=1e-9)
    shape = fit_poly.evaluate(np.eye(6)[5], 20000) * np.sqrt(20000 / 11)
    np.testing.assert_allclose(shape, eval_legendre(5, np.linspace(-1, 1, 20000)), atol=1e-3)


def test_knots_lie_at_the_kinks():
    """If straight pieces meet at 300 and 700, the chord rule finds each knot in one step."""
    y = np.interp(np.arange(1000), [0, 300, 700, 999], [100.0, 10.0, 5.0, 0.0])
    assert fit_poly.find_segments(y, 3, 1) == [(0, 300), (300, 700), (700, 1000)]
    assert fit_poly.find_segments(np.linspace(9, 1, 500), 4, 5)[0][0] == 0
    assert fit_poly.find_segments(np.full(500, 2.0), 4, 5) == [(0, 500)]


@pytest.mark.parametrize("degree", [1, 5, 7])
def test_no_segment_holds_fewer_points_than_coefficients(degree):
    y = np.sort(np.abs(heavy_tailed("lognormal", 400)))[::-1].astype(np.float64)
    segments = fit_poly.find_segments(y, 1024, degree)
    assert len(segments) > 5
    assert min(end - start for start, end in segments) >= degree + 1
    assert [start for start, _ in segments[1:]] == [end for _, end in segments[:-1]]


def test_scale_changes_nothing():
    """The number of segments does not depend on the gradient's scale, unlike the published M."""
    values = heavy_tailed("student", 2000)
    data, decoded = native_and_oracle(dr.FitPoly(), values)
    scaled, decoded_scaled = native_and_oracle(dr.FitPoly(), values * np.float32(2.0**40))
    assert data.size == scaled.size
    np.testing.assert_array_equal(decoded * np.float32(2.0**40), decoded_scaled)


def test_segments_and_degree_are_obeyed():
    values = np.abs(heavy_tailed("laplace", 3000))
    errors = []
    for segments in (1, 4, 16):
        section, decoded, _ = dr.FitPoly(segments=segments).encode(values, key=0)
        assert int.from_bytes(section[4:6], "little") == segments
        errors.append(relative_error(decoded, values))
    assert errors[0] > 1.5 * errors[1] > 1.5 * errors[2]


@pytest.mark.parametrize("bad", [0, 8, -1, 2.5, True, "5"])
def test_bad_degree(bad):
    with pytest.raises(dr.InvalidArgumentError, match="degree: expected an integer of 1 to 7, got"):
        dr.FitPoly(degree=bad)


@pytest.mark.parametrize("bad", [0, 1025, 1.5])
def test_bad_segments(bad):
    with pytest.raises(
        dr.InvalidArgumentError, match="segments: expected an integer of 1 to 1024, got"
    ):
        dr.FitPoly(segments=bad)


@pytest.mark.parametrize(
    "name,most_bytes,most_error",
    [("laplace", 250, 0.01), ("student", 250, 0.03), ("normal", 250, 0.005)],
)
def test_volume_of_the_published_layer(name, most_bytes, most_error):
    """For d = 36,864 at 1 %, the paper reports 1.17 % of dense.

    This is about 250 bytes of values in addition to 1.0 % for raw indices.
    """
    values = heavy_tailed(name, 368, seed=3)
    section, decoded, _ = dr.FitPoly().encode(values, key=0)
    assert len(section) <= most_bytes
    assert relative_error(decoded, values) <= most_error
    assert len(dr.FitDExp().encode(values, key=0)[0]) == 36


@pytest.mark.parametrize(
    "coefficients",
    [
        (3.0, -20.0, 1.0, -1.0),
        (5.0, -50.0, 2.0, -0.5),
        (10.0, -8.0, 1.0, -0.2),
        (1.0, -3.0, 1.0, -2.0),
    ],
)
def test_double_exponential_is_as_good_as_scipy(coefficients):
    def curve(x, a, b, c, d):
        return a * np.exp(b * x) + c * np.exp(d * x)

    x = np.linspace(0, 1, 2000)
    noise = 1 + 0.003 * np.random.default_rng(5).standard_normal(x.size)
    y = np.sort(curve(x, *coefficients) * noise)[::-1].astype(np.float32)
    best, _ = curve_fit(curve, x, y.astype(np.float64), p0=coefficients, maxfev=20000)
    _, decoded = native_and_oracle(dr.FitDExp(), y)
    assert relative_error(decoded, y) <= 1.01 * relative_error(curve(x, *best), y)


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 1, 1, 1, 1], dtype=np.float32),  # singular: nothing varies
        np.array([5, 4], dtype=np.float32),  # too few points for four coefficients
        np.cos(np.linspace(0, 3, 50)).astype(np.float32),  # complex roots
        # a step, from the largest to the smallest
        np.array([3e38, 1e-45, 1e-45, 1e-45, 1e-45], dtype=np.float32),
        np.zeros(9, dtype=np.float32),
    ],
    ids=["equal", "few", "complex", "step", "zeros"],
)
def test_degenerate_double_exponentials_are_finite_and_no_worse_than_a_constant(values):
    _, decoded = native_and_oracle(dr.FitDExp(), values)
    assert np.isfinite(decoded).all()
    error = np.abs(decoded.astype(np.float64) - values)
    constant = np.concatenate([side - side.mean() for side in sort_sides(values)[1] if side.size])
    assert np.linalg.norm(error) <= 1.0001 * np.linalg.norm(constant) + 2.0**-23 * np.linalg.norm(
        values.astype(np.float64)
    )


@pytest.mark.parametrize("value", FITS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_sign_only(sign, count, value):
    """All-positive and all-negative inputs crash published code."""
    values = np.float32(sign) * (np.abs(gradient(count)) + np.float32(0.5))
    _, decoded = native_and_oracle(value, values)
    assert (np.sign(decoded) == sign).all()
    if count:
        assert relative_error(decoded, values) < 0.5


@pytest.mark.parametrize("value", [dr.FitPoly(), dr.FitPoly(degree=1)], ids=repr)
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_equal_values_are_exact(count, value):
    values = np.full(count, 0.1, dtype=np.float32)
    _, decoded, _ = value.encode(values, key=0)
    np.testing.assert_array_equal(decoded, values)


def test_payload_sizes_differ_by_rank():
    """Payloads of one tensor may have different sizes on each rank. Their sum is correct."""
    codec = dr.Codec(dr.TopK(0.05), value=dr.FitPoly())
    gradients = [gradient(10000, key=rank) ** (2 * rank + 1) for rank in range(3)]
    payloads = [codec.encode(each, rank=rank) for rank, each in enumerate(gradients)]
    assert len({data.size for data in payloads}) > 1
    assert [dr.inspect(data)["total_bytes"] for data in payloads] == [
        data.size for data in payloads
    ]
    total = dr.decode_sum(payloads, np.zeros(10000, dtype=np.float32))
    np.testing.assert_array_equal(total, sum(dr.decode(data) for data in payloads))


def hostile_values(values, section):
    """Return a payload with the shape of ``values`` and another value section."""
    parts = container.read(dr.Codec(dr.NoneSparsifier(), value=values[1]).encode(values[0]))
    parts.values = section(parts.values)
    data = container.write(parts)
    results = [
        decode_sum_numpy([data], np.zeros(values[0].size, dtype=np.float32), 1.0, native=native)
        for native in (True, False)
    ]
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
    return results[0]


def test_hostile_polynomials_saturate():
    decoded = hostile_values(
        (gradient(300), dr.FitPoly()), lambda old: old[:8] + b"\xa0\x00\xa0\x00" + old[12:]
    )
    assert np.isfinite(decoded).all() and np.abs(decoded).max() == LARGEST


def test_hostile_exponentials_saturate_or_are_refused():
    def with_coefficients(*coefficients):
        return lambda old: old[:4] + np.array(coefficients, dtype="<f4").tobytes()

    values = gradient(300)
    for extreme in (LARGEST, -LARGEST):
        rates = [LARGEST, extreme, -LARGEST, extreme] * 2
        assert np.isfinite(hostile_values((values, dr.FitDExp()), with_coefficients(*rates))).all()
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(dr.CorruptPayloadError, match="finite"):
            hostile_values((values, dr.FitDExp()), with_coefficients(*[1.0] * 7, bad))


def test_exp_is_accurate():
    x = np.concatenate(
        [np.random.default_rng(1).uniform(-700, 700, 100000), [0.0, -0.0, 1e-300, 0.5 * np.log(2)]]
    )
    np.testing.assert_allclose(exact_math.exp(x), np.exp(x), rtol=4e-16)


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (9,), (100003,), (6, 4099)])
def test_lane_sum_is_sequential_in_each_lane(shape):
    """NumPy does not document the order of a sum over an outer axis. This checks it."""
    terms = np.random.default_rng(2).standard_normal(shape) * 10.0 ** np.random.default_rng(
        3
    ).integers(-8, 8, shape)
    rows = np.zeros((*shape[:-1], -(-shape[-1] // 8) * 8))
    rows[..., : shape[-1]] = terms
    rows = rows.reshape(*shape[:-1], -1, 8)
    lanes = np.zeros((*shape[:-1], 8))
    for row in np.moveaxis(rows, -2, 0):
        lanes = lanes + row
    a, b, c, d, e, f, g, h = np.moveaxis(lanes, -1, 0)
    np.testing.assert_array_equal(
        exact_math.lane_sum(terms), ((a + e) + (c + g)) + ((b + f) + (d + h))
    )
