"""Start a job between hosts and collect the lines of JSON that its first rank prints."""

import json
import os
import pathlib
import signal

from links import NetworkError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _start(network, launcher, command, environment):
    """Start a job; return its processes and the stream of their output."""
    if launcher == "horovodrun":
        job = network.horovodrun(command, environment)
        return [job], job.stdout
    reader, writer = os.pipe()
    jobs = network.torchrun(command, writer, environment)
    os.close(writer)
    return jobs, os.fdopen(reader)


def run_job(network, command, seconds, report, launcher="horovodrun", variables=()):
    """Run one job, one rank per host.

    Args:
        network: a :class:`network.Network`.
        command: words after the Python interpreter.
        seconds: the longest that the job may take.
        report: called with each dictionary that a rank prints after the word ROW.
        launcher: "horovodrun" or "torchrun".
        variables: dictionary of environment variables of the job, in addition to those that all
            jobs have.

    Raises:
        NetworkError: the job failed or took too long; the message has the end of its output.
    """
    cores = os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // len(network.names))),
        # keep freed memory: allocating new pages for Horovod's fp16 in every step takes as long as
        # its arithmetic
        "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "PYTHONPATH": str(ROOT), **dict(variables),
    }  # fmt: skip

    def too_long(*_):
        raise NetworkError(f"job: expected it to end within {seconds:.0f} s")

    jobs, output = _start(network, launcher, command, environment)
    handler = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(round(seconds))
    said = []
    try:
        for line in output:
            rank, _, text = line.rpartition("<stdout>:")  # horovodrun's mark of a rank
            text = text.removeprefix(" ") if rank else line
            if text.startswith("ROW "):
                report(json.loads(text[4:]))
            else:
                said.append(line)
        statuses = [job.wait() for job in jobs]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    failed = [status for status in statuses if status != 0]
    if failed:
        raise NetworkError(
            f"{launcher}: expected exit status 0, got {failed[0]}:\n{''.join(said[-60:])}"
        )
