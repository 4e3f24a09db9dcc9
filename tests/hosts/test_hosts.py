"""Test training between hosts (network namespaces of this machine), with horovodrun over ssh."""

import json
import os
import pathlib
import re
import subprocess
import time

import network
import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: PYTHONPATH of the workers
FOLDERS = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
_MISSING = network.problems()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
_GLOO_SECONDS = 15  # Horovod's own time-out, 30 by default
_START_SECONDS = 120
#: Gloo's messages about a lost connection. The neighbors of the killed rank print them at once. The
#: others print them when the neighbors have ended, or after the time-out.
CAUSES = (
    r"Connection (closed|reset) by peer|Connection timed out|Application timeout caused pair "
    rf"closure|Timed out waiting {_GLOO_SECONDS}000ms"
)


def start(hosts, what, directory, **variables):
    environment = {
        "PYTHONPATH": FOLDERS,
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_SECONDS),
        **variables,
    }
    return hosts.horovodrun([HERE / "worker.py", what, directory], environment)


def said_by(job, seconds):
    """Return the output of a job, which must end in time."""
    try:
        return job.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"horovodrun: expected its end within {seconds} s")


def wait_for(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"expected within {seconds} s, and it did not come"
        time.sleep(0.05)


def alive(directory, rank):
    """Return whether a rank's process runs.

    A process that has ended, but for which its launcher has not yet waited, does not run.
    """
    status = pathlib.Path("/proc", (directory / f"process.{rank}").read_text(), "stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def expect_traffic_of_stats(reports):
    """Compare the bytes on the wire with those of stats(), from the reports of all workers."""

    def totals(codec, figure):
        return [sum(steps) for steps in zip(*(report[codec][figure] for report in reports))]

    # The step with the least traffic, because the background threads communicate during a step.
    protocol = min(
        sent - expected
        for sent, expected in zip(totals("nothing", "sent"), totals("nothing", "expected"))
    )
    for codec in ("recommended", "pairs"):
        shares = [
            (sent - protocol) / expected
            for sent, expected in zip(totals(codec, "sent"), totals(codec, "expected"))
        ]
        assert abs(min(shares) - 1) < 0.05, (
            f"{codec}: bytes on the wire over claimed ones: {shares}; protocol "
            f"{protocol:.0f} B a step"
        )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_training(count, tmp_path):
    """Replicas are bit-identical (the worker checks it), and the traffic matches stats()."""
    with network.Network(count, "1gbit") as hosts:
        # Horovod's background threads communicate in every cycle, by default every 1 ms. Longer
        # cycles keep this traffic below the bytes of a step.
        job = start(hosts, "train", tmp_path, HOROVOD_CYCLE_TIME="20")
        said = said_by(job, _START_SECONDS)
    assert job.returncode == 0, said[-4000:]
    reports = [json.loads((tmp_path / f"report.{rank}.json").read_text()) for rank in range(count)]
    assert [report["host"] for report in reports] == [
        f"h{number}" for number in range(1, count + 1)
    ]

    expect_traffic_of_stats(reports)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4])
def test_a_killed_rank_ends_the_job(count, tmp_path):
    with network.Network(count, "1gbit") as hosts:
        job = start(hosts, "killed_in_a_step", tmp_path)
        said = said_by(job, _START_SECONDS)
        assert job.returncode != 0 and "ended as it should" not in said
        assert f"Process {count - 1} exit with status code" in said, said[-4000:]
        wait_for(lambda: not any(alive(tmp_path, rank) for rank in range(count)), 3 * _GLOO_SECONDS)
    # horovodrun ends rank 0, on its own host, as soon as it learns of the killed rank; the others
    # end with an error message
    for rank in range(1, count - 1) or [0]:
        own = (tmp_path / f"said.{rank}").read_text()
        assert re.search(CAUSES, own), f"rank {rank}: {own[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2])
def test_an_interface_that_goes_down_ends_every_rank(count, tmp_path):
    """No connection is closed here.

    Only the time-out of Gloo detects the failure, on both sides.
    """
    with network.Network(count, "1gbit") as hosts:
        job = start(hosts, "train_on", tmp_path)
        wait_for(
            lambda: all((tmp_path / f"training.{rank}").exists() for rank in range(count)),
            _START_SECONDS,
        )
        hosts.set_link(hosts.names[-1], False)
        said = said_by(job, 3 * _GLOO_SECONDS)
        assert job.returncode != 0 and "ended as it should" not in said
        wait_for(lambda: not any(alive(tmp_path, rank) for rank in range(count)), 3 * _GLOO_SECONDS)
    for rank in (0, count - 1):
        own = (tmp_path / f"said.{rank}").read_text()
        assert re.search(CAUSES, own), f"rank {rank}: {own[-4000:]}"
