"""The number of elements that a sparsifier keeps, given as a ratio or as a count."""

import math

from deepreduce_hvd.argument_checks import expect_float, expect_integer, is_integer
from deepreduce_hvd.errors import InvalidArgumentError


def expect_amount(name, ratio, k):
    """Return ``ratio`` and ``k`` as a float and an int, one of which is given and in range.

    Args:
        name: the name of the sparsifier, for error messages.
        ratio: None, or a number in (0, 1].
        k: None, or an integer in [1, 2^31).

    Returns:
        A tuple (ratio, k). The one that is not given is None.

    Raises:
        InvalidArgumentError: both or none are given, or the one given is out of range.
    """
    if (ratio is None) == (k is None):
        raise InvalidArgumentError(
            f"{name}: expected one of ratio and k, got ratio={ratio!r} and k={k!r}"
        )
    if is_integer(ratio) and ratio >= 1:
        raise InvalidArgumentError(
            f"{name} ratio: expected a float in (0, 1], got the integer {ratio}; write "
            f"{name}(k={ratio}) to keep {ratio} element(s) or {name}(1.0) to keep all"
        )
    if k is None:
        ratio = expect_float(
            f"{name} ratio", ratio, "a number in (0, 1]", lambda ratio: 0 < ratio <= 1
        )
        return ratio, None
    return None, expect_integer(f"{name} k", k, "an integer in [1, 2^31)", lambda k: 0 < k < 2**31)


def kept_count(parameters, d):
    """Return how many of ``d`` elements to keep.

    Args:
        parameters: (ratio, k) as the native core takes them; one of them is 0.
        d: the number of elements.
    """
    ratio, k = parameters
    return int(min(max(k or math.floor(ratio * d), 1), d))
