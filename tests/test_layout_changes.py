"""Test that ranks use the same layout in each step of each optimizer."""

import random

import pytest

from deepreduce_hvd.planning.layout_changes import LayoutChanges


@pytest.mark.parametrize("seed", range(100))
def test_ranks_agree_on_the_layout_of_each_step(seed):
    """Steps begin at other times on each rank, at the latest when all ranks request results."""
    draw = random.Random(seed)
    names = [f"optimizer{number}" for number in range(draw.randint(1, 4))]
    ranks = [LayoutChanges(0) for _ in range(draw.randint(1, 4))]
    used = [{} for _ in ranks]  # (name, number of the step): layout
    begun = [dict.fromkeys(names, 0) for _ in ranks]
    done = dict.fromkeys(names, 0)
    layout = 0

    def begin(rank, name):
        begun[rank][name] += 1
        used[rank][name, begun[rank][name]] = ranks[rank].begin(name)

    for _ in range(60):
        for rank in range(len(ranks)):  # backward makes gradients for some optimizers
            for name in names:
                if begun[rank][name] == done[name] and draw.random() < 0.3:
                    begin(rank, name)
        stepped = draw.choice(names)
        for rank in range(len(ranks)):
            if begun[rank][stepped] == done[stepped]:
                begin(rank, stepped)
        done[stepped] += 1
        if draw.random() < 0.4:
            layout += 1
            largest = [max(column) for column in zip(*(one.begun(names) for one in ranks))]
            for one in ranks:
                one.change(layout, names, largest)
    for rank in range(len(ranks)):
        for name in names:
            while begun[rank][name] < done[name] + 1:
                begin(rank, name)
            begin(rank, name)
            assert used[rank][name, begun[rank][name]] == layout
    assert all(one == used[0] for one in used[1:])
    assert max(used[0].values()) == layout


def test_layouts_that_no_step_needs_are_forgotten():
    changes = LayoutChanges(0)
    for layout in range(1, 100):
        changes.begin("one")
        changes.begin("two")
        changes.change(layout, ["one", "two", "three"], changes.begun(["one", "two", "three"]))
    assert len(changes._changes) == 1
