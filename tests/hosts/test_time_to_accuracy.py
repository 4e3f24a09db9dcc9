"""Test benchmarks/time_to_accuracy.py: a few steps of two rows, and its results file."""

import argparse
import json
import math
import subprocess
import sys

import network
import pytest
import time_to_accuracy

_MISSING = network.problems()
needs_hosts = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
_OPTIONS = ["--links", "1gbit", "--rows", "none;default", "--steps", "6", "--every", "3",
            "--features", "256"]  # fmt: skip


def run(path, *more):
    command = [sys.executable, time_to_accuracy.__file__, *_OPTIONS, "--output", path, *more]
    return subprocess.run(
        list(map(str, command)), text=True, capture_output=True, check=False, timeout=600
    )


@needs_hosts
@pytest.mark.slow
def test_a_few_steps(tmp_path):
    path = tmp_path / "figures.json"
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert [row["row"] for row in results["rows"]] == ["none", "default"]
    for row in results["rows"]:
        assert [step for step, _, _ in row["curve"]] == [3, 6] and row["reached_step"] is None
        assert 0 < row["fastest"] <= row["seconds_per_step"] <= row["slowest"]
        assert 0.02 < row["accuracy"] < 0.9
    none, default = results["rows"]
    # The interface also counts what Horovod's coordination sends: up to 0.4 MB per second, whatever the
    # step sends.
    coordination = {row["row"]: 0.5e6 * row["seconds_per_step"] for row in results["rows"]}
    # 0.86 million floats and the headers of their packets
    assert 3.4e6 < none["sent_bytes"] < 3.7e6 + coordination["none"]
    # The first steps of the default send a quarter of the elements. The indices need the entropy of
    # this choice, 0.81 bits per element of the tensor, and each value one bit. The counters of the
    # interface include packets that TCP sends again.
    bits = 0.25 - 0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    expected = 3.5e6 * bits / 32
    assert 0.9 * expected < default["sent_bytes"] < 1.2 * expected + coordination["default"]
    assert path.with_suffix(".png").stat().st_size > 5000

    # The rows exist, so nothing is trained. Both rows reach this target at once, which only changes
    # the report.
    again = run(path, "--target", "0.02")
    assert again.returncode == 0 and "step 3" not in again.stdout, again.stdout + again.stderr
    assert all(row["reached_step"] == 3 for row in json.loads(path.read_text())["rows"])
    other = run(path, "--seed", "1")
    assert other.returncode != 0 and "name another --output" in other.stderr


def row(link, name, curve, seconds_per_step):
    return {"link": link, "row": name, "curve": curve, "seconds_per_step": seconds_per_step}


def test_a_row_that_does_not_reach_the_target():
    """The seconds are computed from the steps that the row needed on the other link."""
    slow = row("100mbit", "fp16", [[25, 50.0, 0.5], [50, 100.0, 0.6]], 2.0)
    fast = row("1gbit", "fp16", [[25, 5.0, 0.5], [50, 10.0, 0.6], [75, 15.0, 0.8]], 0.2)
    ours = row("100mbit", "default", [[25, 3.0, 0.5], [100, 10.0, 0.7]], 0.1)
    rows = [slow, fast, ours]
    for each in rows:
        time_to_accuracy.summarize(each, rows, 0.7)
    assert (slow["reached_step"], slow["computed_seconds"]) == (None, 150.0)
    assert (fast["reached_step"], fast["reached_seconds"]) == (75, 15.0)
    assert fast["computed_seconds"] is None
    assert time_to_accuracy.verdicts(rows) == [
        {"link": "100mbit", "faster_than_fp16": 15.0, "target": 8, "met": True}
    ]
    text = time_to_accuracy.describe(
        {**slow, "steps": 50, "seconds": 100.0, "accuracy": 0.6}, argparse.Namespace(target=0.7)
    )
    assert "0.7 not reached in 100 s (computed from the steps on the other link: 150 s)" in text
