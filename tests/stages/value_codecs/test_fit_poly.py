"""Test FitPoly: its error, its segments and its volume.

It is compared with independent fits, and tested for the pitfalls of published code.
"""

import numpy as np
import pytest
from codecs_table import gradient
from fitted_values import heavy_tailed, hostile_values, native_and_oracle, relative_error
from numpy.polynomial import chebyshev
from scipy.special import eval_legendre
from value_sections import LARGEST

import deepreduce_hvd as dr
from deepreduce_hvd import container
from deepreduce_hvd.stages.value_codecs import fit_poly
from deepreduce_hvd.stages.value_codecs.fit_sides import sort_sides


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


def unsorted_sides(seed):
    """Return values of two sides; the sort ignores the last bits of the magnitudes of both.

    The positive ones differ little, by at most 31 units of their last place; the negative ones have
    all exponents.
    """
    random = np.random.default_rng(seed)
    start = random.choice(np.array([0, 1, 40, 0x800000, 0x3F800000], dtype=np.uint32))
    least = np.zeros(random.integers(40, 700), dtype=np.uint32)
    chosen = random.integers(least.size, size=random.integers(1, 12))
    least[chosen] = random.integers(0, 32, chosen.size)
    wide = random.integers(0x7F7FFFFF, size=random.integers(1, 50), dtype=np.uint32)
    bits = np.concatenate([start + least, wide | np.uint32(1 << 31)])
    return np.concatenate([bits, [0x80000000, 0xFF7FFFFF]]).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("degree", [1, 5])
@pytest.mark.parametrize("segments", [2, 5, None])
def test_cuts_of_values_that_differ_only_in_ignored_bits(segments, degree):
    """The cuts are those of the oracle, also of numbers below the normal ones."""
    for seed in range(60):
        native_and_oracle(dr.FitPoly(degree, segments), unsorted_sides(seed))


def test_a_side_that_increases_is_one_segment():
    wide = -np.ldexp(np.float32(1), np.arange(-140, 120)).astype(np.float32)
    increasing = 0
    for start in range(0x3F800000, 0x3F800020):
        bits = np.full(64, start, dtype=np.uint32)
        bits[63] += 1
        values = np.concatenate([bits.view(np.float32), wide])
        _, (y, _) = sort_sides(values)
        data, _ = native_and_oracle(dr.FitPoly(degree=1), values)
        if y[0] < y[-1]:
            increasing += 1
            assert int.from_bytes(container.read(data).values[4:6], "little") == 1
    assert increasing == 31


def test_hostile_polynomials_saturate():
    decoded = hostile_values(
        (gradient(300), dr.FitPoly()), lambda old: old[:8] + b"\xa0\x00\xa0\x00" + old[12:]
    )
    assert np.isfinite(decoded).all() and np.abs(decoded).max() == LARGEST
