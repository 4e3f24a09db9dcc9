"""Products of test settings. The default run uses a sample of them."""

import itertools
import zlib

import pytest

#: whether products include slow cases; without them, 20 000 fewer tests are created and deselected
with_slow_cases = True
#: one of this many slow cases is created
one_in = 1


def parametrize_product(slow=None, **axes):
    """Parametrize a test by the product of several axes; most cases are slow tests.

    With up to three axes, the cases of the default run contain each pair of values of any two axes.
    With more axes, they contain each pair of values of the two longest, and each value of the
    others.

    Args:
        slow: {name of an argument: values whose cases are all slow}.
        axes: {name of an argument: its values}.
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
    """Parametrize a test by the product of several axes, with few cases in the default run.

    The cases of the default run contain each value of each axis.

    Args:
        axes: {name of an argument: its values}.
    """
    names, values = list(axes), [list(axis) for axis in axes.values()]
    longest = max(map(len, values))
    quick = {tuple(number % len(axis) for axis in values) for number in range(longest)}
    return _parametrize(names, values, quick)


def _parametrize(names, values, quick):
    """Parametrize by the product. Cases whose positions are not in ``quick`` are slow."""
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


def some(every, names):
    """Return about one in ``every`` of the names with ``--one-in``, and all without it."""
    if one_in == 1:
        return list(names)
    return [name for name in names if zlib.crc32(name.encode()) % every == 0]


def _label(value):
    return value if isinstance(value, str) else repr(value)
