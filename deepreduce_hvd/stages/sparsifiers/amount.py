"""The number of elements that a sparsifier keeps, given as a ratio or as a count."""

import math

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.settings import is_integer, is_number


def check_amount(name, ratio, k):
    """Check that exactly one of ``ratio`` and ``k`` is given and that it is in range.

    Args:
        name: the name of the sparsifier, for error messages.
        ratio: None, or a number in (0, 1].
        k: None, or an integer in [1, 2^31).

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
    if ratio is not None and not (is_number(ratio) and 0 < ratio <= 1):
        raise InvalidArgumentError(f"{name} ratio: expected a number in (0, 1], got {ratio!r}")
    if k is not None and not (is_integer(k) and 1 <= k < 2**31):
        raise InvalidArgumentError(f"{name} k: expected an integer in [1, 2^31), got {k!r}")


def kept_count(parameters, d):
    """Return how many of ``d`` elements to keep.

    Args:
        parameters: (ratio, k) as the native core takes them; one of them is 0.
        d: the number of elements.
    """
    ratio, k = parameters
    return int(min(max(k or math.floor(ratio * d), 1), d))
