"""Console output of the set-up scripts: one line per step, progress, and logs of failures."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "logs"
_LIVE = sys.stdout.isatty()
_SECONDS_BETWEEN_LINES = 0.5 if _LIVE else 20.0
_TAIL_LINES = 40


class SetUpError(Exception):
    """A failed step; the message says what was expected, what was found, and what to do."""


def cache_directory():
    """Return the cache for wheels and data, shared by all clones and by examples/datasets.py."""
    return (
        Path(os.environ.get("DEEPREDUCE_CACHE") or Path.home() / ".cache" / "deepreduce-hvd")
        .expanduser()
        .resolve()
    )


def say(message):
    print(f"[set-up] {message}", flush=True)


def clean_environment(**changes):
    """Return the environment without variables that add packages of another Python."""
    unwanted = (
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_REQUIREMENT",
    )
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment.update(changes)
    return environment


def _progress(log, percent_pattern):
    """Return the last percentage in the log, or its last line, cut to the width of a terminal."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        text = file.read().decode(errors="replace")
    if percent_pattern is not None:
        found = re.findall(percent_pattern, text)
        return f"{found[-1]} %" if found else "preparing"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:60] if lines else ""


def run(command, what, usually, percent_pattern=None, environment=None, cwd=None, log_name=None):
    """Run a command with its output in a log file, and show its progress.

    Raises:
        SetUpError: the command failed; the message has the end of the log.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{log_name or what.split()[0]}.log"
    say(f"{what}: usually {usually}; log: {os.path.relpath(log)}")
    start = shown = time.monotonic()
    with log.open("wb") as output:
        output.write((" ".join(map(str, command)) + "\n").encode())
        output.flush()
        child = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
            env=environment or clean_environment(), cwd=cwd or ROOT,
        )  # fmt: skip
        try:
            while child.poll() is None:
                time.sleep(0.1)
                now = time.monotonic()
                if now - shown >= _SECONDS_BETWEEN_LINES:
                    shown = now
                    line = f"[set-up]   {now - start:4.0f} s  {_progress(log, percent_pattern)}"
                    print(f"\r{line:<90}" if _LIVE else line, end="" if _LIVE else "\n", flush=True)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if _LIVE and shown != start:
        print(f"\r{'':<90}\r", end="")
    if child.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise SetUpError(
            f"{what}: expected exit status 0, got {child.returncode}; the end of "
            f"{os.path.relpath(log)}:\n{tail}"
        )
    say(f"{what}: done in {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def locked(path, what):
    """Hold a lock file, so that two set-ups at once share one download or build."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise SetUpError(f"{path}: expected a file that can be written, got {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up that is {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
