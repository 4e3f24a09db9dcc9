"""An elastic job under the real horovodrun --min-np, in which a test lets workers join, kills them
and takes them out.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
_SECONDS = 240  # time limit of a wait, on a busy machine
#: A survivor that notices first that a rank was killed may keep its connections open. The others
#: then wait for it until Gloo's time-out, in about one job of four. With 15 s, workers that start
#: on an overloaded machine come too late for the others.
_GLOO_SECONDS = "30"


class Job:
    """An elastic job on this machine, under names of its own as if they were different hosts.

    Args:
        directory: folder for the files through which the test and the workers talk.
        script: the workers' program, beside this file.
        arguments: the program's arguments after the directory.
        process_sets: whether ranks may make process sets during training. A job in which a test
            kills a rank must not: Horovod 0.28.1 then holds the lock of its table of process sets
            while it waits for other ranks. When a rank dies, the survivors' programs and Horovod's
            threads go on at the same moment. If the thread ends first, a collective that starts
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
        launcher = pathlib.Path(sys.executable).with_name("horovodrun")
        command = [
            launcher,
            "-np",
            "2",
            "--min-np",
            "1",
            "--max-np",
            "3",
            "--host-discovery-script",
            discovery,
        ]
        self.said = open(directory / "said", "w+")
        self.process = subprocess.Popen(
            [*map(str, command), sys.executable, str(HERE / script), str(directory), *arguments],
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

    def end(self):
        (self.directory / "enough").touch()
        return self.process.wait(timeout=_SECONDS)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.said.close()


def come_and_go(job, removal, killed=True):
    """One rank joins, one is killed or taken out, another is taken out; returns the last moment at
    which training started again.
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
    starts = [json.loads(line) for line in (job.directory / "starts").read_text().splitlines()]
    assert list(dict.fromkeys(start["size"] for start in starts)) == [3, 2, 1]
    # ranks that have only left are not made up for before the first step; if no commit has seen the
    # last steps, all go back to it, and start again
    for start in {start["size"]: start for start in starts}.values():
        assert start["kept"] > 0
        assert start["error"] <= 1e-6 * start["kept"], start
    assert (job.directory / "finished.0").read_text() == "1"
    return starts[-1]
