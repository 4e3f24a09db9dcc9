"""Starts a script on several ranks of this machine with horovodrun and shows what rank 0 prints;
the options of all such scripts.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: what TensorFlow, which horovodrun imports, logs about absent GPUs and graphs that it cannot
#: optimise
_FRAMEWORK_NOISE = re.compile(
    r"(\[\d+\]<stderr>:)?([EWI]0000 |WARNING: All log messages before absl)"
)


def command_line(description, passes_over, epochs, output):
    """The parser of the options that every example has; its figures go to results/``output``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--processes", type=int, default=2, help="ranks on this machine (default 2)"
    )
    parser.add_argument(
        "--epochs", type=int, default=epochs, help=f"passes over {passes_over} (default {epochs})"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=ROOT / "results" / output,
        help=f"where the figures go (default results/{output})",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def launch(script, processes, arguments):
    """Runs ``script --worker *arguments`` on ``processes`` ranks; returns the exit status."""
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    command = [
        str(launcher),
        "-np",
        str(processes),
        sys.executable,
        str(pathlib.Path(script).resolve()),
        "--worker",
        *arguments,
    ]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONUNBUFFERED="1")
    # keep freed memory: fresh pages for every step's activations cost as much as the arithmetic on
    # them
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))  # the largest that glibc takes
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # nothing else ends a job in which one rank's program hangs
    environment.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        for line in job.stdout:
            rank, mark, text = line.partition("<stdout>:")
            if mark and rank.endswith("]"):
                sys.stdout.write(text.removeprefix(" "))
            elif not _FRAMEWORK_NOISE.match(line):
                sys.stderr.write(line)
            sys.stdout.flush()
    if job.returncode != 0:
        print(
            f"the job failed with status {job.returncode}; its messages are above", file=sys.stderr
        )
    return job.returncode
