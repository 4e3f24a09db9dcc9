"""Test the notes that ranks write to Horovod's rendezvous server."""

import atexit
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from deepreduce_hvd.coordination import peers
from deepreduce_hvd.coordination.peers import Board, Note, who_is_gone

http_server = pytest.importorskip("horovod.runner.http.http_server")


@pytest.fixture
def board():
    server = http_server.RendezvousServer(0)
    port = server.start()
    server.init([])
    yield Board("127.0.0.1", port)
    server.stop()


def test_a_note_comes_back(board):
    note = Note("waits", 12, "the gradient of 0.weight", "train.py:7 in main", 61.5)
    assert board.get(3) is None
    assert board.put(3, note)
    assert board.get(3) == note
    board.remove(3)
    assert board.get(3) is None


def test_what_a_rank_said_in_an_earlier_step_is_past(board):
    """A note from an earlier step is ignored: if a rank waits in step 7, all have begun step 6."""
    board.put(1, Note("elsewhere", 5, "", "setup.py:1 in load", 2))
    assert board.get(1, step=7) is None
    assert "no sign of life from rank 1" in who_is_gone(board, 0, 2, 7, grace=0.1)
    board.put(1, Note("elsewhere", 6, "", "data.py:1 in load", 2))
    assert board.get(1, step=7).place == "data.py:1 in load"
    assert "rank 1 last heard of elsewhere at data.py:1 in load" in who_is_gone(
        board, 0, 2, 7, grace=0.1
    )
    board.put(1, Note("ended", 5))
    assert board.get(1, step=7) == Note("ended", 5)


def test_no_server():
    nowhere = Board("127.0.0.1", 1)
    assert not nowhere.put(0, Note("failed", 1))
    assert nowhere.get(0) is None
    nowhere.remove(0)
    assert "does not know which rank is gone" in who_is_gone(nowhere, 0, 2, 1)
    assert "does not know which rank is gone" in who_is_gone(None, 0, 2, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"{}", b"[]", b"7", b"[" * 100_000, b'["waits", 1, "", "", NaN]',
        b'["waits", 1, "", "", 1e999]', b'["waits", "1", "", "", 0]',
        b'["waits", true, "", "", 0]', b'["dances", 1, "", "", 0]', b'["waits", 1, 2, "", 0]',
        b'[["waits"], 1, "", "", 0]', b'["waits", 1, "", ""]',
    ],
)  # fmt: skip
def test_what_is_no_note_is_none(data):
    assert Note.unpack(data) is None


def test_texts_are_bounded_and_printable():
    note = Note.unpack(
        json.dumps(["ended", 1, "a\x1b[31m\nb\ud800" + "x" * 10_000, "", 0]).encode()
    )
    assert note.what.startswith("a?[31m?b?x")
    assert len(note.what) <= 300


def test_a_long_answer_is_not_read(board):
    board._request("PUT", "rank.1", b" " * 10_000 + Note("waits", 1).pack())
    assert board.get(1) is None


def test_silent_ranks_are_named_after_the_grace(board):
    board.put(1, Note("failed", 4))
    started = time.monotonic()
    text = who_is_gone(board, 0, 4, 4, grace=0.5)
    assert time.monotonic() - started < 3
    assert text.startswith(
        "expected all 4 ranks to continue, got no sign of life from ranks 2, 3 within"
    )
    assert board.get(0) == Note("failed", 4)


def test_ranks_that_tell_why_they_ended_are_not_waited_for(board):
    board.put(0, Note("ended", 4, "ValueError: bad batch", "train.py:3 in load"))
    board.put(2, Note("failed", 4))
    started = time.monotonic()
    assert who_is_gone(board, 1, 3, 4, grace=60) == (
        "expected all 3 ranks to continue, got rank 0 ended in step 4 by ValueError: bad "
        "batch at train.py:3 in load"
    )
    assert time.monotonic() - started < 30


def test_all_alive(board):
    board.put(1, Note("failed", 4))
    assert "all 2 ranks are alive" in who_is_gone(board, 0, 2, 4)


def test_of_many_ranks_the_first_ones_read(board):
    assert [rank for rank in range(32) if peers.reads(rank, 32)] == list(range(32))
    assert [rank for rank in range(4096) if peers.reads(rank, 4096)] == [0, 1]
    assert who_is_gone(board, 7, 4096, 1) == "the logs of ranks 0 to 1 say which rank is gone"


_ASKS = """
import sys
from deepreduce_hvd.coordination.peers import Board, who_is_gone
print("asks", flush=True)
who_is_gone(Board("127.0.0.1", int(sys.argv[1])), 0, 2, 4, grace=60)
"""


def test_a_rank_that_is_told_to_end_says_first_what_it_knows(board):
    process = subprocess.Popen(
        [sys.executable, "-c", _ASKS, str(board._port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "asks\n"
    deadline = time.monotonic() + 30
    while board.get(0) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert "no sign of life from rank 1" in said
    assert "others may have too" in said


def test_the_answer_to_termination_is_the_callers_again(board):
    before = signal.getsignal(signal.SIGTERM)
    who_is_gone(board, 0, 2, 4, grace=0.1)
    assert signal.getsignal(signal.SIGTERM) is before
    # in a thread, where no handler can be set
    thread = threading.Thread(target=who_is_gone, args=(board, 0, 2, 4, 0.1))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def no_thread(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch):
    """The store's own time limit is a minute per request."""
    pytest.importorskip("torch")
    from deepreduce_hvd.torch.ddp import failures

    monkeypatch.setattr(failures, "_REQUEST_SECONDS", 0.2)
    answers, asked = threading.Event(), []

    class Store:
        def check(self, keys):
            asked.append(keys)
            assert answers.wait(30)
            return False

        def set(self, key, value):
            asked.append(key)

    board = failures.StoreBoard(Store())
    started = time.monotonic()
    try:
        assert board.get(1) is None
        assert board.get(0) is None and not board.put(0, Note("failed", 1))
        board.remove(0)
        assert asked == [["deepreduce/rank.1"]] and time.monotonic() - started < 5
    finally:
        answers.set()


def test_two_threads_that_ask_a_store_both_get_answers():
    pytest.importorskip("torch")
    from deepreduce_hvd.torch.ddp.failures import StoreBoard

    class Store:
        def check(self, keys):
            asked.set()
            time.sleep(0.3)
            return True

        def get(self, key):
            return Note("failed", 1).pack()

    asked, board, found = threading.Event(), StoreBoard(Store()), []
    watch = threading.Thread(target=lambda: found.append(board.get(1)))
    watch.start()
    assert asked.wait(30)
    assert board.get(2) == Note("failed", 1)
    watch.join(30)
    assert found == [Note("failed", 1)]


def test_the_watch_follows_a_new_initialization(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    from deepreduce_hvd.torch.ddp import failures

    class Adapter:
        def progress(self):
            return 0

    monkeypatch.setattr(failures, "_watcher", None)
    for _ in range(2):
        store = dist.HashStore()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
        failures.watch(Adapter())
        atexit.unregister(failures._watcher._at_exit)
        assert failures._watcher.board.put(3, Note("failed", 1))
        assert store.check(["deepreduce/rank.3"])
    failures._watcher._stop.set()


def test_a_store_that_answers_has_the_notes_of_all_ranks(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    from deepreduce_hvd.torch.ddp.failures import StoreBoard

    board = StoreBoard(dist.HashStore())
    # from Python 3.12 on, at the end of the process
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert board.get(1) is None
    assert board.put(1, Note("failed", 1)) and board.get(1) == Note("failed", 1)
    board.remove(1)
    assert board.get(1) is None
