"""Products of test settings, of which the default run takes a sample."""

import itertools
import zlib

import pytest

#: whether products have their slow cases: without them 20 000 tests fewer are made and left out
with_slow_cases = True
#: one in so many of the slow cases is made
one_in = 1


def parametrize_product(slow=None, **axes):
    """Parametrize a test by the product of several axes, most of it marked slow.

    The cases that stay in the default run hold each pair of values of any two axes, up to three
    axes. With more axes they hold each pair of the two longest, and each value of the others.

    Args:
        slow: name of an argument -> those of its values whose cases are all slow.
        axes: name of an argument -> its values.
    """
    names = sorted(axes, key=lambda name: -len(list(axes[name])))
    values = [list(axes[name]) for name in names]
    quick = set()
    for places in itertools.product(*(range(len(axis)) for axis in values[:2])):
        rest = (
            (places[0] + factor * places[-1]) % len(axis)
            for factor, axis in enumerate(values[2:], 1)
        )
        quick.add((*places, *rest))
    for name, left_out in (slow or {}).items():
        axis = names.index(name)
        quick = {places for places in quick if values[axis][places[axis]] not in left_out}
    return _parametrize(names, values, quick)


def parametrize_values(**axes):
    """Parametrize a test by the product of several axes, of which the default run takes few cases:
    each value of each axis is in one of them.

    Args:
        axes: name of an argument -> its values.
    """
    names, values = list(axes), [list(axis) for axis in axes.values()]
    longest = max(map(len, values))
    quick = {tuple(number % len(axis) for axis in values) for number in range(longest)}
    return _parametrize(names, values, quick)


def _parametrize(names, values, quick):
    """Parametrize by the product; what is not at the places of ``quick`` is slow."""
    chosen = [
        places
        for places in itertools.product(*(range(len(axis)) for axis in values))
        if places in quick or (with_slow_cases and zlib.crc32(repr(places).encode()) % one_in == 0)
    ]
    cases = [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places)),
            id="-".join(_label(axis[place]) for axis, place in zip(values, places)),
            marks=[] if places in quick else [pytest.mark.slow],
        )
        for places in chosen
    ]
    return pytest.mark.parametrize(",".join(names), cases)


def _label(value):
    return value if isinstance(value, str) else repr(value)
