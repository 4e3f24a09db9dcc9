"""Which numbers ranks may send as float16, so that their sum neither overflows nor loses much."""

_LARGEST = 65504.0
#: the smallest number above zero, and the distance between neighbours up to 2^-13
_SMALLEST = 2.0**-24
#: multiples of this many times the smallest number lose less than 4 % when they are divided by a
#: number of ranks that is no power of two
_UNEVEN = 16


def limit_of(size):
    """Return the largest magnitude of which ``size`` numbers can be summed in float16.

    Each addend and each sum may be rounded up by a factor of 1 + 2^-11.

    Args:
        size: number of ranks, an integer or a float tensor.
    """
    return _LARGEST / (size * (1 + size * 2**-11))


def unit_of(size, power):
    """Return the unit of numbers whose average over ``size`` ranks is still a float16.

    Horovod divides the sum as float16. Without a unit, the smallest number of one rank would become
    zero when it is divided by two, and no rank would know.

    Args:
        size: number of ranks, an integer or a float tensor.
        power: the smallest power of two that is not smaller than ``size``.

    Returns:
        A power of two. If ``size`` is one too, averages of small multiples of it are exact.
    """
    return _SMALLEST * power * (_UNEVEN - (_UNEVEN - 1) * (size // power))
