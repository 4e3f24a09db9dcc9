"""Test the names of a program's own collectives that have none, without other ranks."""

import collections
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("horovod.torch")

from deepreduce_hvd.torch import unnamed

EVERYONE = SimpleNamespace(process_set_id=0, ranks=[0, 1, 2])


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a collective and returns its name."""
    monkeypatch.setattr(unnamed, "_numbers", unnamed._Numbers())

    def _gather_async(tensor, name, process_set):
        if tensor is None:
            raise ValueError("not supported")
        started.append(name)
        return len(started)

    started = []
    named = unnamed._naming(_gather_async)

    def call(*arguments, tensor=0, **keywords):
        handle = named(tensor, *arguments, **keywords)
        return started[-1], unnamed.number_of(handle)

    return call


def test_only_collectives_without_a_name_count(start):
    assert start(None, EVERYONE) == ("gather.unnamed.0", 0)
    assert start("loss", EVERYONE) == ("loss", None)
    assert start(name=None, process_set=EVERYONE) == ("gather.unnamed.1", 1)


def test_a_collective_that_does_not_start_does_not_count(start):
    """The other ranks do not know of it."""
    other = SimpleNamespace(process_set_id=1, ranks=[0, 1])
    draw, counts = random.Random(0), collections.Counter()
    for _ in range(200):
        among = draw.choice([EVERYONE, other])
        if draw.random() < 0.3:
            with pytest.raises(ValueError, match="not supported"):
                start(None, among, tensor=None)
        else:
            assert start(None, among)[1] == counts[among.process_set_id]
            counts[among.process_set_id] += 1


def test_process_sets_count_by_their_ranks(start):
    """Horovod gives the id of a set that was removed to the next one."""
    old, new = (SimpleNamespace(process_set_id=1, ranks=ranks) for ranks in ([0, 1], [0, 1, 2]))
    assert [start(None, old)[1] for _ in range(3)] == [0, 1, 2]
    assert start(None, new)[1] == 0 and start(None, old)[1] == 3


def test_the_numbers_start_again_after_a_shutdown(start):
    start(None, EVERYONE)
    assert unnamed._starting_again(lambda: "done")() == "done"
    assert start(None, EVERYONE)[1] == 0


def test_handles_are_not_kept_for_ever(start):
    for _ in range(3000):
        start(None, EVERYONE)
    assert len(unnamed._numbers._of_handle) <= 1024
