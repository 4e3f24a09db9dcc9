"""Test the exponential decay that is the same on every machine."""

import decimal
import math
from fractions import Fraction

import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.numerics.exact_decay import exact_decay

RATIOS = (0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.001, 0.0001)


@pytest.mark.parametrize("last", RATIOS)
def test_it_is_close_to_the_power_of_this_machine(last):
    for first in (1.0, 0.5, 0.3, 0.25):
        for steps in (1, 2, 3, 50, 375):
            for step in range(steps + 1):
                power = first * (last / first) ** (step / steps)
                assert abs(exact_decay(first, last, step, steps) - power) <= 6 * math.ulp(power)
            assert exact_decay(first, last, 0, steps) == first
            assert exact_decay(first, last, steps, steps) == last


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_warm_up_has_the_nearest_floats(ratio):
    """So the bits are the same everywhere. The power of this machine is not always the nearest."""
    first, last, steps = Fraction(0.25), Fraction(ratio), 50
    for step in range(steps):
        got = dr.TopK(ratio, warmup_steps=steps).parameters(step)[0]
        half = Fraction(math.ulp(got)) / 2
        exact = first ** (steps - step) * last**step
        assert (Fraction(got) - half) ** steps <= exact <= (Fraction(got) + half) ** steps


def test_settings_of_the_program_change_nothing():
    expected = [exact_decay(0.25, 0.003, step, 7) for step in range(8)]
    coarse = decimal.Context(prec=3, rounding=decimal.ROUND_UP, traps=[decimal.Inexact])
    with decimal.localcontext(coarse):
        exact_decay.cache_clear()
        assert [exact_decay(0.25, 0.003, step, 7) for step in range(8)] == expected


def test_ratios_that_are_hardly_positive():
    tiny = 5e-324
    ratios = [exact_decay(1.0, tiny, step, 3) for step in range(4)]
    assert ratios[0] == 1 and ratios[-1] == tiny and ratios == sorted(ratios, reverse=True)
