"""Measure several settings in turns in one job, so that a slow moment of the machine meets all."""

import random

_MEASURED = 4  # steps of a turn, after one that is not measured
_LONG = 1.5  # seconds


def seconds_in_turns(names, step, count, enough=lambda turns: False):
    """Return {setting: list of seconds of its steps}.

    A turn of a setting has four measured steps, after one that is not measured, because a job makes
    its steps without those of other settings between them. If the first step takes more than 1.5 s,
    it is measured, and is the whole turn, to save time.

    Args:
        names: names of the settings.
        step: function of a name that makes a step, and returns its seconds on the slowest rank. It
            returns the same on all ranks.
        count: number of turns of each setting, at most.
        enough: function of the number of turns so far that returns whether to end, the same on all
            ranks.
    """
    for name in names:  # the first step of a job takes longer
        step(name)
    seconds = {name: [] for name in names}
    for turn in range(count):
        # in another order each time, the same on all ranks: a setting can slow down the next one
        for name in random.Random(turn).sample(list(names), len(names)):
            first = step(name)
            if first > _LONG:
                seconds[name].append(first)
            else:
                seconds[name] += [step(name) for _ in range(_MEASURED)]
        if enough(turn + 1):
            break
    return seconds
