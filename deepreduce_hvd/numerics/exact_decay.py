"""An exponential decay that is the same on every machine; the power of the C library is not.

It uses Python's decimal numbers, whose logarithm and exponential are correctly rounded.
"""

import decimal
import functools

_CONTEXT = decimal.Context(
    prec=28, rounding=decimal.ROUND_HALF_EVEN, Emin=-999999, Emax=999999, traps=[]
)


@functools.lru_cache(maxsize=64)  # all gradients of a step ask for the same number
def exact_decay(first: float, last: float, step: int, steps: int) -> float:
    """Return first * (last / first)^(step / steps), rounded to the nearest float.

    Args:
        first, last: positive numbers.
        step, steps: integers with 0 <= step <= steps. The result is exactly ``first`` at step 0 and
            ``last`` at the last one.

    >>> [exact_decay(0.16, 0.01, step, 4) for step in range(5)]
    [0.16, 0.08, 0.04, 0.02, 0.01]
    """
    exponent = _CONTEXT.divide(_CONTEXT.multiply(_log_of_ratio(first, last), step), steps)
    return float(_CONTEXT.multiply(decimal.Decimal(first), _CONTEXT.exp(exponent)))


@functools.lru_cache(maxsize=64)
def _log_of_ratio(first, last):
    return _CONTEXT.ln(_CONTEXT.divide(decimal.Decimal(last), decimal.Decimal(first)))
