"""Run several failures in one job under torchrun, each in separate processes.

Most of the time of such a job is the import of PyTorch. Each rank forks a process for each failure,
after the import and before the first thread. torchrun does not see how these processes end, so it
terminates none of them before the message is printed.
"""

import datetime
import gc
import json
import os
import pathlib
import sys
import time

import torch._dynamo  # imported here because DDP imports it later, which takes 2 s  # noqa: F401
import torch.distributed as dist

#: time limit of a collective, in seconds
_SECONDS = 8


def main(failures):
    """Run the failures that the command line names: ``FAILURE``, or ``DIRECTORY FAILURE...``.

    In the second form, the directory gets the output of the rank in each failure, ``FAILURE.RANK``,
    and the exit statuses, ``statuses.RANK``.

    Args:
        failures: {name: function}.
    """
    first, *names = sys.argv[1:]
    if not names:
        return _run(first, failures, None)
    directory = pathlib.Path(first)
    statuses = {}
    gc.freeze()  # the processes share the imported modules
    for name in names:
        _meet(directory, name)
        process = os.fork()
        if not process:
            return _run(name, failures, directory)
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    (directory / f"statuses.{os.environ['RANK']}").write_text(json.dumps(statuses))
    return None


def _meet(directory, name):
    """Wait until all ranks have reached a failure."""
    (directory / f"{name}.{os.environ['RANK']}").touch()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        while not (directory / f"{name}.{rank}").exists():
            time.sleep(0.01)


def _run(name, failures, directory):
    timeout = datetime.timedelta(seconds=_SECONDS)
    if directory is None:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        said = os.open(directory / f"{name}.{rank}", os.O_WRONLY | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        dist.init_process_group(
            "gloo", timeout=timeout, store=dist.PrefixStore(name, store), rank=rank, world_size=size
        )
    failures[name]()
    print("went on silently", flush=True)
