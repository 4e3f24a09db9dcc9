"""A natural logarithm that is the same on every machine, because it uses only basic operations.

The tests compare csrc/support/exact_log.h with this file.
"""

import math

LN2 = 0.6931471805599453


def exact_log(x):
    """Return ln(x) for a normal positive float, within a few units in the last place.

    >>> exact_log(1.0), exact_log(0.5) == -LN2
    (0.0, True)
    """
    fraction, exponent = math.frexp(x)
    if fraction < 0.7071067811865476:
        fraction *= 2
        exponent -= 1
    s = (fraction - 1) / (fraction + 1)
    square = s * s
    series = 0.0
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return exponent * LN2 + 2 * s * series
