"""Workers that join, are killed and leave, under the real horovodrun --min-np: nothing that memories keep is lost, and training goes on."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
_SECONDS = 90  # for what is waited for


class Job:
    """An elastic job on this machine, under names of its own as if they were different hosts."""

    def __init__(self, directory, *arguments):
        self.directory = directory
        self.set_hosts("localhost:1", "127.0.0.1:1")
        discovery = directory / "discovery.sh"
        discovery.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        discovery.chmod(0o755)
        root = HERE.parent.parent
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join([str(root), str(HERE.parent)]), OMP_NUM_THREADS="1", HOROVOD_GLOO_TIMEOUT_SECONDS="20"
        )
        launcher = pathlib.Path(sys.executable).with_name("horovodrun")
        command = [launcher, "-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", discovery]
        self.said = open(directory / "said", "w+")
        self.process = subprocess.Popen(
            [*map(str, command), sys.executable, str(HERE / "torch_elastic.py"), str(directory), *arguments],
            cwd=root, env=environment, stdout=self.said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def set_hosts(self, *hosts):
        (self.directory / "hosts.new").write_text("\n".join(hosts) + "\n")
        (self.directory / "hosts.new").rename(self.directory / "hosts")

    def progress(self):
        path = self.directory / "progress"
        return json.loads(path.read_text()) if path.exists() else {"size": 0, "step": 0}

    def wait_for(self, size, steps=7):
        """Until so many ranks have gone on for some steps; returns the step."""
        deadline = time.monotonic() + _SECONDS
        first = None
        while True:
            now = self.progress()
            if now["size"] == size:
                first = now["step"] if first is None else first
                if now["step"] >= first + steps:
                    return now["step"]
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.said.seek(0)
                pytest.fail(f"expected {size} ranks to train, got {now} and exit status {self.process.poll()}:\n{self.said.read()[-6000:]}")
            time.sleep(0.05)

    def kill(self, host, local_rank):
        os.kill(int((self.directory / f"process.{host}.{local_rank}").read_text()), signal.SIGKILL)

    def end(self):
        (self.directory / "enough").touch()
        return self.process.wait(timeout=_SECONDS)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.said.close()


@pytest.mark.parametrize("communicator", ["allgather", pytest.param("auto", marks=pytest.mark.slow)])
def test_ranks_come_and_go(tmp_path, communicator):
    job = Job(tmp_path, communicator)
    try:
        steps = [job.wait_for(2)]
        job.set_hosts("localhost:2", "127.0.0.1:1")
        steps.append(job.wait_for(3))
        job.kill("127.0.0.1", 0)
        steps.append(job.wait_for(2))
        job.set_hosts("localhost:1")
        steps.append(job.wait_for(1))
        status = job.end()
        job.said.seek(0)
        assert status == 0, job.said.read()[-6000:]
    finally:
        job.close()
    assert steps == sorted(steps), "expected training to go on from the last commit"
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert [start["size"] for start in starts] == [3, 2, 1]
    for start in starts:
        assert start["largest"] > 0
        assert start["error"] <= 1e-6 * start["largest"], start
    assert (tmp_path / "finished.0").read_text() == "1"
