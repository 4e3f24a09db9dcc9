"""Test DDP and fully_shard between hosts (network namespaces of this machine), with torchrun."""

import json
import pathlib
import re
import statistics
import subprocess
import time

import network
import pytest
from test_hosts import FOLDERS, alive, expect_traffic_of_stats, wait_for

HERE = pathlib.Path(__file__).resolve().parent
_MISSING = network.problems()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))]
_START_SECONDS = 120
_GONE = r"from rank 1|[Cc]onnection (closed|reset) by peer|[Tt]imed out|timeout"


class Job:
    """A job of torchrun with its output in a file."""

    def __init__(self, hosts, what, directory, worker="ddp_worker.py", ranks=1):
        self._said = directory / "said"
        environment = {"PYTHONPATH": FOLDERS, "OMP_NUM_THREADS": "1"}
        with self._said.open("w") as said:
            self._processes = hosts.torchrun(
                [HERE / worker, what, directory], said, environment, ranks
            )

    def statuses(self, seconds):
        """Return the exit statuses of all hosts, which must end in time, and the output."""
        deadline = time.monotonic() + seconds
        try:
            found = [
                process.wait(max(deadline - time.monotonic(), 0.1)) for process in self._processes
            ]
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"torchrun: expected its end within {seconds} s\n{self._said.read_text()[-4000:]}"
            )
        return found, self._said.read_text()


def test_training(tmp_path):
    """Replicas are bit-identical (the worker checks it), and the traffic matches stats()."""
    with network.Network(2, "1gbit") as hosts:
        statuses, said = Job(hosts, "train", tmp_path).statuses(_START_SECONDS)
    assert statuses == [0, 0], said[-4000:]
    reports = [json.loads((tmp_path / f"report.{rank}.json").read_text()) for rank in range(2)]
    assert sorted(report["host"] for report in reports) == ["h1", "h2"]
    expect_traffic_of_stats(reports)


def test_hosts_with_shards_exchange_payloads_only(tmp_path):
    """Two hosts of two ranks: the copies of a shard are equal (the worker checks it).

    What is gathered and reduced within a host does not cross the link.
    """
    with network.Network(2, "1gbit") as hosts:
        job = Job(hosts, "train", tmp_path, "fsdp_worker.py", ranks=2)
        statuses, said = job.statuses(_START_SECONDS)
    assert statuses == [0, 0], said[-4000:]
    reports = [json.loads((tmp_path / f"report.{rank}.json").read_text()) for rank in range(4)]
    assert sorted(report["host"] for report in reports) == ["h1", "h1", "h2", "h2"]
    protocol = min(reports[0]["nothing"]["sent"])
    for codec, most in (("recommended", 0.15), ("pairs", 0.15)):
        for mine in (reports[:2], reports[2:]):
            dense = 4 * sum(report[codec]["elements"] for report in mine)
            sent = statistics.median(mine[0][codec]["sent"])
            claimed = statistics.median(
                map(sum, zip(*(report[codec]["claimed"] for report in mine)))
            )
            assert 0.9 * claimed < sent < claimed + protocol + 0.05 * dense, (codec, sent, claimed)
            assert sent < most * dense, (codec, sent, dense)


def test_a_killed_rank_ends_the_job(tmp_path):
    with network.Network(2, "1gbit") as hosts:
        statuses, said = Job(hosts, "killed_in_a_step", tmp_path).statuses(_START_SECONDS)
        wait_for(lambda: not any(alive(tmp_path, rank) for rank in range(2)), 5)
    assert 0 not in statuses and "ended as it should" not in said
    assert re.search(_GONE, said), said[-4000:]


def test_an_interface_that_goes_down_ends_every_rank(tmp_path):
    """No connection is closed here; only time-outs detect the failure, on both sides."""
    with network.Network(2, "1gbit") as hosts:
        job = Job(hosts, "train_on", tmp_path)
        wait_for(
            lambda: all((tmp_path / f"training.{rank}").exists() for rank in range(2)),
            _START_SECONDS,
        )
        hosts.set_link("h2", False)
        wait_for(lambda: not any(alive(tmp_path, rank) for rank in range(2)), _START_SECONDS)
        hosts.set_link("h2", True)  # for torchrun's own connection, which waits much longer
        statuses, said = job.statuses(_START_SECONDS)
    assert 0 not in statuses and re.search(_GONE, said), said[-4000:]
