"""Start a worker script with torchrun."""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def torchrun(processes, script, *arguments, timeout=300):
    """Run ``script`` on ``processes`` ranks of this machine.

    Returns:
        The finished process; each line of its output begins with ``[defaultRANK]:``.
    """
    root = HERE.parent.parent
    folders = root, HERE, HERE.parent / "support", root / "benchmarks" / "accuracy"
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(map(str, folders)), OMP_NUM_THREADS="1"
    )
    launcher = pathlib.Path(sys.executable).with_name("torchrun")
    command = [launcher, "--standalone", "--tee=3", f"--nproc-per-node={processes}", HERE / script]
    return subprocess.run(
        [*map(str, command), *map(str, arguments)],
        env=environment,
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )


def lines_of(rank, output):
    """Return what one rank has printed."""
    return "\n".join(re.findall(rf"^\[default{rank}\]:(.*)$", output, re.MULTILINE))
