"""Start a job between hosts and collect the lines of JSON that its first rank prints."""

import json
import os
import pathlib
import signal

from links import NetworkError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_job(network, command, seconds, report):
    """Run one job under horovodrun, one rank per host.

    Args:
        network: a :class:`network.Network`.
        command: words after the Python interpreter.
        seconds: the longest that the job may take.
        report: called with each dictionary that a rank prints after the word ROW.

    Raises:
        NetworkError: the job failed or took too long; the message has the end of its output.
    """
    cores = os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // len(network.names))),
        # keep freed memory: allocating new pages for Horovod's fp16 in every step takes as long as
        # its arithmetic
        "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip

    def too_long(*_):
        raise NetworkError(f"job: expected it to end within {seconds:.0f} s")

    job = network.horovodrun(command, environment)
    handler = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(round(seconds))
    said = []
    try:
        for line in job.stdout:
            _, mark, row = line.partition("<stdout>:")
            row = row.removeprefix(" ")
            if mark and row.startswith("ROW "):
                report(json.loads(row[4:]))
            else:
                said.append(line)
        status = job.wait()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    if status != 0:
        raise NetworkError(
            f"horovodrun: expected exit status 0, got {status}:\n{''.join(said[-60:])}"
        )
