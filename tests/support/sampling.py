"""Products of test settings: the default run takes a sample that covers all pairs."""

import itertools

import pytest

#: whether products have their slow cases: without them 20 000 tests fewer are made and left out
with_slow_cases = True


def parametrize_product(**axes):
    """Parametrize a test by the product of several axes, most of it marked slow.

    The cases that stay in the default run hold each pair of values of any two axes, up to three
    axes. With more axes they hold each pair of the two longest, and each value of the others.

    Args:
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
    chosen = itertools.product(*(range(len(axis)) for axis in values))
    if not with_slow_cases:
        chosen = [places for places in chosen if places in quick]
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
