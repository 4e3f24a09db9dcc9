"""Test FitDExp: its size, its error compared with an independent fit, and hostile sections."""

import numpy as np
import pytest
from codecs_table import gradient
from fitted_values import heavy_tailed, hostile_values, native_and_oracle, relative_error
from scipy.optimize import curve_fit
from value_sections import LARGEST

import deepreduce_hvd as dr
from deepreduce_hvd.stages.value_codecs.fit_sides import sort_sides


@pytest.mark.parametrize("name", ["laplace", "student", "normal"])
def test_size(name):
    values = heavy_tailed(name, 368, seed=3)
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
