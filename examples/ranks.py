"""Start a script on several ranks with horovodrun or torchrun; the command line options of such
scripts.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: what TensorFlow, which horovodrun imports, logs about missing GPUs and graphs that it cannot
#: optimize
_FRAMEWORK_NOISE = re.compile(
    r"(\[\d+\]<stderr>:)?([EWI]0000 |WARNING: All log messages before absl)"
)


def _passes(text):
    """Return a number of passes; a whole one as an int."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected more than 0 passes, got {text}")
    return int(number) if number.is_integer() else number


def _processes(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 process, got {text}")
    return int(text)


def command_line(description, passes_over, epochs, output):
    """Return the parser of the options that every example has.

    By default the results go to build/results/``output``. The figures in README and docs/ are in
    results/, which the tests compare with the pages.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--processes", type=_processes, default=2, help="ranks on this machine (default 2)"
    )
    parser.add_argument(
        "--epochs",
        type=_passes,
        default=epochs,
        help=f"passes over {passes_over}, also a fraction (default {epochs})",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=ROOT / "build" / "results" / output,
        help=f"where the figures go (default build/results/{output})",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def launch(script, processes, arguments, launcher="horovodrun"):
    """Run ``script --worker *arguments`` on ``processes`` ranks; return the exit status.

    Under horovodrun, only the standard output of rank 0 is shown.

    Args:
        launcher: "horovodrun" or "torchrun".
    """
    path = str(pathlib.Path(script).resolve())
    words = {
        # without --gloo it imports TensorFlow once more, to find out whether there is MPI
        "horovodrun": ["--gloo", "-np", str(processes), sys.executable, path],
        "torchrun": ["--standalone", "--nproc-per-node", str(processes), path],
    }[launcher]
    program = str(pathlib.Path(sys.executable).with_name(launcher))
    command = [program, *words, "--worker", *arguments]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONUNBUFFERED="1")
    # keep freed memory: allocating new pages for the activations of every step takes as long as the
    # computation on them
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))  # the maximum of glibc
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # otherwise a job in which one rank hangs would never end
    environment.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        for line in job.stdout:
            _show(line, launcher)
    if job.returncode != 0:
        print(
            f"the job failed with status {job.returncode}; its messages are above", file=sys.stderr
        )
    return job.returncode


def _show(line, launcher):
    """Print a line of a job's output, without the mark of its rank."""
    rank, mark, text = line.partition("<stdout>:")
    if launcher == "torchrun":
        sys.stdout.write(line)
    elif mark and rank.endswith("]"):
        sys.stdout.write(text.removeprefix(" "))
    elif not _FRAMEWORK_NOISE.match(line):
        sys.stderr.write(line)
    sys.stdout.flush()
