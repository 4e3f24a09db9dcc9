"""Test how benchmarks measure several settings in turns."""

import turns


def test_the_first_step_of_a_turn_is_not_measured():
    made = []

    def step(name):
        made.append(name)
        return len(made)  # so each step can be told from the others

    names = ("a", "b", "c")
    turns_of = {name: [] for name in names}
    short = turns._LONG / 1000
    found = turns.seconds_in_turns(names, lambda name: short * step(name), 7)
    assert made[:3] == list(names)
    assert len(made) == 3 + 3 * 7 * 5
    for place in range(3, len(made), 5):
        (name,) = set(made[place : place + 5])
        turns_of[name] += [short * (place + extra + 1) for extra in range(1, 5)]
    assert found == turns_of
    # the order differs between rounds
    orders = {tuple(made[start : start + 15 : 5]) for start in range(3, len(made), 15)}
    assert len(orders) > 1 and all(sorted(order) == list(names) for order in orders)


def test_a_long_step_is_a_turn():
    seconds = {"long": 2.0, "short": 0.5}
    calls = []

    def step(name):
        calls.append(name)
        return seconds[name]

    found = turns.seconds_in_turns(seconds, step, 3)
    assert found == {"long": [2.0] * 3, "short": [0.5] * 12}
    assert calls.count("long") == 4 and calls.count("short") == 16


def test_turns_end_when_there_are_enough():
    asked = []

    def enough(count):
        asked.append(count)
        return count == 3

    found = turns.seconds_in_turns("ab", lambda name: 0.0, 9, enough)
    assert asked == [1, 2, 3]
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 12, "b": 12}
