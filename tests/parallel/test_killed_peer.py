"""Test that the survivors of a killed rank end with an error, and that none waits forever."""

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("killed_peer.py")


def expect_that_survivors_end(*arguments, timeout):
    finished = subprocess.run(
        [sys.executable, _SCRIPT, *arguments],
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_collectives_that_wait_for_the_killed_rank():
    """Horovod fails all of them together, under a lock, while this rank starts more."""
    expect_that_survivors_end("--runs", "1", "--work", "waiting", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_kill_at_a_random_moment_of_training(ranks):
    expect_that_survivors_end("--runs", "3", "--ranks", str(ranks), timeout=600)
