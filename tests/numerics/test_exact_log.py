"""Test the logarithm that is the same on every machine."""

import math

from deepreduce_hvd.numerics.exact_log import exact_log


def test_exact_log_is_a_logarithm():
    for x in (1e-9, 1e-3, 0.1, 0.5, 0.7071, 0.999, 1.0, 2.0, 1e6):
        assert math.isclose(exact_log(x), math.log(x), rel_tol=1e-14, abs_tol=1e-15)
