"""Run the tests in two parts: single-process tests on all cores, then jobs of ranks side by side.

Ranks wait for each other for much of their time, so three jobs share two cores well. Each file's
jobs run one by one, the longest files first (tests/conftest.py). Other options go to pytest:
``python scripts/run_tests.py -k bloom``.
"""

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time

#: pytest's exit status when it finds no test to run
_NO_TESTS = 5
#: of the slow cases of products of settings, such as index codec x value codec x input, one in so
#: many is run with --slow; ``pytest -m "not several_processes"`` runs all
_ONE_IN = 15
#: cases of each single-process test, without --slow
_AT_MOST = 8
#: the same with --fast
_AT_MOST_FAST = 4
#: jobs of ranks at a time, on any machine
_MOST_JOBS = 6
#: PR_SET_TIMERSLACK of Linux, and the nanoseconds by which a sleep may end late. While ranks wait for
#: each other, Horovod sleeps for 1 µs at a time. With Linux' default of 50,000 ns, the many short
#: sleeps take a part of the cores.
_PR_SET_TIMERSLACK, _TIMER_SLACK = 29, 1_000_000
#: every run shows where its time goes
_DURATIONS = ("--durations=25", "--durations-min=2")


def run(title, *options):
    """Run pytest; return its exit status."""
    print(f"[tests] {title}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", *_DURATIONS, *options]
    status = subprocess.run(command, check=False).returncode
    print(f"[tests] {title}: done in {time.monotonic() - started:.0f} s", flush=True)
    return status


def sleep_longer():
    """Let this process and those that it starts wake up less often, if the system can."""
    with contextlib.suppress(OSError, AttributeError):  # no C library, or one without prctl
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK), 0, 0, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slow", action="store_true", help="the slow tests too")
    parser.add_argument(
        "--fast",
        action="store_true",
        help="at most four cases of each test; no jobs of several ranks, no builds, no emulated GPU",
    )
    arguments, others = parser.parse_known_args()
    left_out, cases = "", []
    if not arguments.slow:
        left_out = " and not slow"
        cases = [f"--at-most={_AT_MOST_FAST if arguments.fast else _AT_MOST}"]
    if arguments.fast:
        left_out += " and not device and not subprocesses"
    others = [f"--one-in={_ONE_IN}", *others]
    processes = str(os.cpu_count())
    statuses = [
        run(
            f"on {processes} processes",
            "-n",
            processes,
            "-m",
            f"not several_processes{left_out}",
            "-q",
            *cases,
            *others,
        )
    ]
    if not arguments.fast:
        sleep_longer()
        statuses.append(
            run(
                "jobs of several ranks",
                "-n",
                str(min(os.cpu_count() + 1, _MOST_JOBS)),
                "--dist",
                "loadfile",
                "--no-loadscope-reorder",
                "-m",
                f"several_processes{left_out}",
                "-v",
                *others,
            )
        )
    failed = [status for status in statuses if status not in (0, _NO_TESTS)]
    sys.exit(failed[0] if failed else min(statuses))


if __name__ == "__main__":
    main()
