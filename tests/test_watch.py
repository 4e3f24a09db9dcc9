"""Test the watch on long waits, with a stand-in for Horovod (see also test_hung_peer.py)."""

import atexit
import gc
import itertools
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

from deepreduce_hvd import Codec, NoMemory, NoneSparsifier
from deepreduce_hvd.communicators import Allgather
from deepreduce_hvd.communicators.base import Transport
from deepreduce_hvd.communicators.bucket import Bucket, BucketMember
from deepreduce_hvd.communicators.exchange import Exchange
from deepreduce_hvd.coordination.frames import Wait, exchange_in
from deepreduce_hvd.coordination.peers import Board, Note
from deepreduce_hvd.coordination.watch import Watcher, _limits

http_server = pytest.importorskip("horovod.runner.http.http_server")


class Silence(Transport):
    """A transport of two ranks. The other rank sends nothing until ``over`` is set."""

    size, rank = 2, 0

    def __init__(self):
        self.over = threading.Event()

    def allgather(self, array, name):
        return array

    def test(self, handle):
        return self.over.is_set()

    def wait(self, handle):
        return np.concatenate([handle, handle])


class Horovod:
    """A stand-in for Horovod on rank 0 of three ranks."""

    __name__ = "horovod"

    def __init__(self):
        self.is_shut_down = threading.Event()

    def is_initialized(self):
        return not self.is_shut_down.is_set()

    def rank(self):
        return 0

    def size(self):
        return 3

    def shutdown(self):
        self.is_shut_down.set()


class Adapter:
    def progress(self):
        return 7


@pytest.fixture
def board(monkeypatch):
    server = http_server.RendezvousServer(0)
    port = server.start()
    server.init([])
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    yield Board("127.0.0.1", port)
    server.stop()


@pytest.fixture
def exchange():
    """An exchange that waits in a thread."""
    transport = Silence()
    members = [BucketMember(f"layer{number}", np.ones(8, np.float32), ()) for number in range(5)]
    one = Exchange(
        Allgather(),
        Bucket(Codec(NoneSparsifier()), NoMemory(), members),
        transport,
        "deepreduce.0.layer0",
    )
    thread = threading.Thread(target=one.wait)
    thread.start()
    yield one
    transport.over.set()
    thread.join(30)
    assert not thread.is_alive()


def start(session, is_failure=lambda error: False, find_wait=lambda frame: None, take_part=None):
    horovod = Horovod()
    watcher = Watcher(horovod, np, find_wait, is_failure, horovod.shutdown, take_part=take_part)
    atexit.unregister(watcher._at_exit)
    watcher.add(session)
    return watcher


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_long_wait_says_what_for_and_who_is_missing_and_ends(
    board, exchange, caplog, monkeypatch
):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.9")
    board.put(1, Note("elsewhere", 6, "", "data.py:3 in load", 0.3))
    session = Adapter()
    with caplog.at_level(logging.WARNING, "deepreduce_hvd"):
        watcher = start(session)
        assert watcher._horovod.is_shut_down.wait(30)
        watcher._stop.set()
        watcher._thread.join(30)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(
        "deepreduce_hvd: rank 0 has waited 0 s for the exchange deepreduce.0.layer0.1 of "
        "layer0, layer1, layer2 and 2 more, at "
    )
    assert "test_watch.py" in said[0]
    assert (
        "in step 7. Nothing is heard from rank 2: gone, stopped, disconnected, without a "
        "compressor, or here for less than"
    ) in said[0]
    assert "Rank 1 is elsewhere at data.py:3 in load in step 6, for 0 s" in said[0]
    assert said[-1].endswith("Horovod is shut down after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    note = board.get(0)
    assert note.state == "waits"
    assert note.what.startswith("the exchange deepreduce.0.layer0.1")


def test_a_rank_that_has_joined_waits_for_as_long_as_the_others_train(board, caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.3")
    watcher = start(Adapter(), find_wait=lambda frame: Wait(1, lambda: "hvd.join", joined=True))
    until(lambda: getattr(board.get(0), "seconds", 0) > 1)
    watcher._stop.set()
    watcher._thread.join(30)
    assert not watcher._horovod.is_shut_down.is_set()
    assert not caplog.records
    assert board.get(0).what == "hvd.join"


def test_a_program_that_stays_elsewhere_leaves_a_note_and_says_nothing(board, caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    session = Adapter()
    watcher = start(session)
    until(lambda: board.get(0) is not None)
    note = board.get(0)
    assert note.state == "elsewhere"
    assert note.step == 7
    assert not caplog.records
    session.progress = lambda: 8
    until(lambda: getattr(board.get(0), "step", 8) == 8)
    watcher._stop.set()
    watcher._thread.join(30)


class Call:
    """A stand-in for a frame: an object that lives as long as something holds it."""


def test_calls_of_equal_key_are_told_apart_and_only_a_long_one_is_held(board, caplog, monkeypatch):
    """Python may give the frame of the next call the address of the last one."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    calls, held = [], []  # weak references to calls; how many live when the next one begins
    the_long_one = Call()

    def find_wait(frame):
        if len(calls) == 12:
            return Wait("address", lambda: "the call", call=the_long_one)
        held.append(sum(one() is not None for one in calls))
        call = Call()
        calls.append(weakref.ref(call))
        return Wait("address", lambda: "the call", call=call)

    watcher = start(Adapter(), find_wait=find_wait)
    until(lambda: len(calls) == 12)
    assert held[:2] == [0, 0], "expected the first call of a step not to be held"
    assert max(held) <= 1
    assert not caplog.records, "expected no message about calls that are over"
    until(lambda: caplog.records)
    assert "has waited 0 s for the call" in caplog.records[0].getMessage()
    watcher._stop.set()
    watcher._thread.join(30)


def test_a_rank_that_waits_in_a_handshake_asks_for_it_until_it_is_over(board, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    waits = [Wait(1, lambda: "the handshake", handshake="handshake.0")]
    watcher = start(
        Adapter(), find_wait=lambda frame: waits[0], take_part=lambda is_asked_for: None
    )
    until(lambda: board.is_asked_for("handshake.0"))
    assert not board.is_asked_for("handshake.1")
    waits[0] = Wait(2, lambda: "the handshake", handshake="handshake.1")
    until(lambda: board.is_asked_for("handshake.1"))
    assert not board.is_asked_for("handshake.0")
    waits[0] = None
    until(lambda: not board.is_asked_for("handshake.1"))
    watcher._stop.set()
    watcher._thread.join(30)


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (Wait(1, lambda: "a gradient"), True),
        (Wait(1, lambda: "hvd.join", joined=True), False),
        (Wait(1, lambda: "the handshake", handshake="handshake.1"), False),
        (None, False),
    ],
)
def test_a_rank_that_waits_elsewhere_takes_part_in_a_handshake(board, monkeypatch, wait, expected):
    """A rank that computes, has joined, or waits in a handshake itself does not take part."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    asked_for = []
    watcher = start(
        Adapter(),
        find_wait=lambda frame: wait,
        take_part=lambda is_asked_for: asked_for.append(is_asked_for("handshake.0")),
    )
    until(lambda: board.get(0) is not None)
    board.ask_for("handshake.0")
    time.sleep(0.5)
    watcher._stop.set()
    watcher._thread.join(30)
    assert (True in asked_for) == expected


def test_after_a_failure_the_note_says_so(board, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.4")
    session = Adapter()
    watcher = start(session)
    until(lambda: board.get(0) is not None)
    board.put(1, Note("failed", 7))
    assert watcher.explain(grace=0.3).startswith(
        "expected all 3 ranks to continue, got no sign of life from rank 2"
    )
    assert watcher.explain(grace=0.3) == "", "expected it to be said once"
    time.sleep(0.5)
    assert board.get(0) == Note("failed", 7)
    watcher._stop.set()


@pytest.mark.parametrize("error", [None, ValueError("a bad batch")])
def test_the_end_leaves_a_note(board, monkeypatch, error):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    session = Adapter()
    watcher = start(session)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watcher._at_exit()
    assert board.get(0) == Note("ended", 7, "" if error is None else "ValueError: a bad batch")


def test_the_end_by_a_failure_closes_the_connections_without_a_new_thread(board, monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    watcher = start(Adapter(), is_failure=lambda error: True)
    for rank in (1, 2):
        board.put(rank, Note("failed", 7))
    monkeypatch.setattr(sys, "last_value", RuntimeError("a lost connection"), raising=False)
    monkeypatch.setattr(threading.Thread, "start", no_thread)  # from Python 3.12 on
    watcher._at_exit()
    assert watcher._horovod.is_shut_down.is_set() and not watcher._thread.is_alive()


def test_waits_that_end_by_themselves_are_not_ended(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "70")
    for shut_down, expected in ((lambda: None, 70), (None, math.inf)):
        watcher = Watcher(Horovod(), np, None, None, shut_down)
        atexit.unregister(watcher._at_exit)
        watcher._stop.set()
        assert watcher._end_after == expected


def test_a_child_process_leaves_no_note(board, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    watcher = start(Adapter())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    watcher._at_exit()
    assert board.get(0) is None


def test_what_does_not_wait_is_no_wait():
    assert exchange_in(sys._getframe()) is None


@pytest.mark.parametrize(
    ("check", "end", "expected"),
    [
        ("0", "", (60, math.inf)),
        ("x", "y", (60, math.inf)),
        ("5", "4", (5, math.inf)),
        ("5", "9", (5, 9)),
    ],
)
def test_limits_are_horovods(monkeypatch, check, end, expected):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", check)
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", end)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _limits(True) == expected
        assert _limits(False) == (expected[0], math.inf)
    ignored = [str(one.message) for one in caught]
    assert len(ignored) == (end == "4"), ignored
    assert all(
        "expected at least 5" in text and "got 4, which is ignored" in text for text in ignored
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_starts_while_frames_of_others_are_read(monkeypatch, enabled):
    """It could end a frame that is being read, before Python 3.12."""
    found = []
    watcher = start(Adapter(), find_wait=lambda frame: found.append(gc.isenabled()))
    monkeypatch.setattr(watcher._horovod, "shutdown", lambda: None)
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        for _ in range(3):
            thread = threading.Thread(target=watcher._look)  # reads the frames of this thread
            thread.start()
            thread.join()
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
    assert found and not any(found)


def test_no_frames_are_read_while_steps_go_on(monkeypatch):
    steps, found = itertools.count(), []

    class Trains:
        def progress(self):
            return next(steps)

    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0")
    session = Trains()
    watcher = start(session, find_wait=found.append)
    for _ in range(10):
        watcher._look()
    assert not found
    session.progress = lambda: 100
    threads = [threading.Thread(target=watcher._look) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found
