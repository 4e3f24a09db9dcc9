"""An elastic job under the real horovodrun --min-np.

A test lets workers join, kills them and removes them.
"""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest
from launch import LAUNCHERS
from rank_servers import python_command

HERE = pathlib.Path(__file__).resolve().parent
_SECONDS = 240  # time limit of a wait, for a busy machine
#: A survivor that notices first that a rank was killed may keep its connections open. The others
#: then wait for it until Gloo's time-out, in about one job of four. With 15 s, workers that start
#: on an overloaded machine join too late for the others.
_GLOO_SECONDS = "30"


class Job:
    """An elastic job on this machine, whose names are used as if they were different hosts.

    Args:
        directory: folder for the files that the test and the workers exchange.
        script: the workers' program, in the folder of this file.
        arguments: the program's arguments after the directory.
        process_sets: whether ranks may create process sets during training. It must be False if a
            test kills a rank: Horovod 0.28.1 then holds the lock of its table of process sets while
            it waits for other ranks. When a rank dies, the survivors' programs and Horovod's
            threads continue at the same moment. If the thread ends first, a collective that starts
            then is never answered, and its name stays taken after the reset.
    """

    def __init__(self, directory, script, *arguments, process_sets=False):
        self.directory = directory
        self.set_hosts("localhost:1", "127.0.0.1:1")
        discovery = directory / "discovery.sh"
        discovery.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        discovery.chmod(0o755)
        root = HERE.parent.parent
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join([str(root), str(HERE.parent / "support")]),
            OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3",
            HOROVOD_GLOO_TIMEOUT_SECONDS=_GLOO_SECONDS,
            HOROVOD_DYNAMIC_PROCESS_SETS=str(int(process_sets)),
        )  # fmt: skip
        command = [
            *LAUNCHERS["horovodrun"],
            "-np",
            "2",
            "--min-np",
            "1",
            "--max-np",
            "4",
            "--host-discovery-script",
            discovery,
        ]
        self.said = open(directory / "said", "w+")  # noqa: SIM115  # the job writes to it
        self.process = subprocess.Popen(
            [*map(str, [*command, *python_command(HERE / script), directory]), *arguments],
            cwd=root, env=environment, stdout=self.said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def set_hosts(self, *hosts):
        (self.directory / "hosts.new").write_text("\n".join(hosts) + "\n")
        (self.directory / "hosts.new").rename(self.directory / "hosts")

    def progress(self):
        path = self.directory / "progress"
        return json.loads(path.read_text()) if path.exists() else {"size": 0, "step": 0}

    def wait_for(self, size, steps=7):
        """Wait until this number of ranks has trained for some steps; return the step."""
        deadline = time.monotonic() + _SECONDS
        first = None
        while True:
            now = self.progress()
            if now["size"] == size:
                first = now["step"] if first is None else first
                if now["step"] >= first + steps:
                    return now["step"]
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"expected {size} ranks to train, got {now} and exit status "
                    f"{self.process.poll()}:\n{self.output()[-6000:]}"
                )
            time.sleep(0.05)

    def kill(self, host, local_rank):
        os.kill(int((self.directory / f"process.{host}.{local_rank}").read_text()), signal.SIGKILL)

    def output(self):
        self.said.seek(0)
        return self.said.read()

    def starts(self):
        """Return {number of ranks: the record of their last start of training}.

        If ranks have only left, their memories are taken over in the first step, not before it. If
        no commit has the last steps, all ranks go back to the last commit and start again.
        """
        records = map(json.loads, (self.directory / "starts").read_text().splitlines())
        return {record["size"]: record for record in records}

    def end(self):
        (self.directory / "enough").touch()
        return self.process.wait(timeout=_SECONDS)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.said.close()


def come_and_go(job, removal, killed=True, keeps=True):
    """Let one rank join, kill or remove one, and remove another one.

    Args:
        job: the :class:`Job`.
        removal: whether the last rank leaves ``"after a commit"`` or ``"without a commit"``.
        killed: whether the second change kills a rank; otherwise it is removed.
        keeps: whether the memories are never all zero, as after a plan without compression.

    Returns:
        The record of the last start of training.
    """
    try:
        steps = [job.wait_for(2)]
        job.set_hosts("localhost:2", "127.0.0.1:1")
        steps.append(job.wait_for(3))
        if killed:
            job.kill("127.0.0.1", 0)
        else:
            job.set_hosts("localhost:2")
        steps.append(job.wait_for(2))
        if removal == "without a commit":
            (job.directory / "no_commits").touch()
            job.wait_for(2)  # steps that are lost with their rank
        job.set_hosts("localhost:1")
        if removal == "without a commit":
            job.wait_for(1, steps=1)
            (job.directory / "no_commits").unlink()
        steps.append(job.wait_for(1))
        status = job.end()
        said = job.output()
        assert status == 0, said[-6000:]
    finally:
        job.close()
    assert "no sign of life" not in said, "expected survivors to go on without asking who is gone"
    assert steps == sorted(steps), "expected training to go on from the last commit"
    starts = job.starts()
    assert list(starts) == [3, 2, 1]
    for start in starts.values():
        assert start["kept"] > 0 or not keeps
        assert start["error"] <= 1e-6 * start["kept"], start
    assert (job.directory / "finished.0").read_text() == "1"
    return starts[1]


def lose_a_host(job):
    """Kill one of two ranks of a host; Horovod removes the whole host then."""
    try:
        job.set_hosts("localhost:2", "127.0.0.1:2")
        job.wait_for(4)
        job.kill("127.0.0.1", 0)
        job.wait_for(2)
        status = job.end()
        said = job.output()
        assert status == 0 and "memories are lost" not in said, said[-6000:]
    finally:
        job.close()
    start = job.starts()[2]
    assert start["kept"] > 0 and start["error"] <= 1e-6 * start["kept"], start
