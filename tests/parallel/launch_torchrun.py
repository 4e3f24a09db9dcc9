"""Start a worker script with torchrun."""

import re

from launch import HERE, run_ranks


def torchrun(processes, script, *arguments, timeout=300):
    """Run ``script`` on ``processes`` ranks of this machine.

    Returns:
        The finished process; each line of its output begins with ``[defaultRANK]:``.
    """
    return run_ranks(
        "torchrun", "--standalone", "--tee=3", f"--nproc-per-node={processes}", HERE / script,
        *arguments, folders=[HERE], timeout=timeout,
    )  # fmt: skip


def lines_of(rank, output):
    """Return what one rank has printed."""
    return "\n".join(re.findall(rf"^\[default{rank}\]:(.*)$", output, re.MULTILINE))
