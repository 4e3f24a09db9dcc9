"""What launchers tell the processes that they start, in environment variables."""

import os

#: Number of processes, as set by Open MPI, by MPICH and others, by Slurm's srun, and by torchrun.
_PROCESSES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


def is_elastic():
    """Return whether Horovod's launcher may change the set of ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def why_alone():
    """Return what to do if a launcher has started several processes, or None.

    Horovod without MPI knows only the processes that horovodrun has started. Under another
    launcher, each process is a job of its own, and trains alone.
    """
    for name in _PROCESSES:
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return (
                f"Horovod has one rank, but {text} processes were started ({name}={text}). Each of"
                " them trains alone; start them with horovodrun, or build Horovod with MPI"
                " (docs/tutorial-multi-node.md)"
            )
    return None
