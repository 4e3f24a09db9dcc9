"""The parts of scripts/gpu_check.py, one after another, and the programs that they run."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: PYTHONPATH of all scripts: the package, which is not installed in this Python, and the tests'
#: tables of codecs
FOLDERS = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))


class Stop(Exception):
    """The check cannot continue, or it found an error."""


def say(message):
    print(f"[gpu-check] {message}", flush=True)


@contextlib.contextmanager
def part(title, expected):
    say(f"{title} ({expected})")
    started = time.perf_counter()
    yield
    say(f"{title}: {time.perf_counter() - started:.0f} s")


class Parts:
    """The parts of the check after the build.

    Each part runs even if an earlier one failed, so that one run gives as much information as
    possible.
    """

    def __init__(self):
        self.not_run = []
        self.failed = []

    def run(self, title, expected, work):
        """Run one part of the check and report it.

        ``work()`` returns why it did not run, or None, and raises Stop for an error.
        """
        try:
            with part(title, expected):
                reason = work()
        except (Stop, subprocess.TimeoutExpired) as stop:
            say(f"FAILED: {title}: {stop}")
            self.failed.append(title)
        else:
            if reason is not None:
                self.not_run.append(f"{title}: {reason}")


def run(*command, timeout=None, **environment):
    variables = {**os.environ, "PYTHONPATH": FOLDERS, "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=variables, timeout=timeout, check=False
    )


def expect_success(what, finished):
    if finished.returncode != 0:
        raise Stop(f"{what}: expected exit status 0, got {finished.returncode}")


def script(path, *arguments):
    expect_success(path, run(sys.executable, path, *arguments))
