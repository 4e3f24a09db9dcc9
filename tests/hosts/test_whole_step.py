"""Test benchmarks/whole_step.py: whole steps of a network on 2 hosts."""

import json
import subprocess
import sys

import network
import pytest
import whole_step
from whole_step_rows import DEFAULT, LOCAL, ROWS

_MISSING = network.problems()


@pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
@pytest.mark.slow
def test_rows_of_a_network(tmp_path):
    path = tmp_path / "whole.json"
    command = [
        sys.executable, whole_step.__file__, "--networks", "resnet18", "--cycles", "1",
        "--turns", "1", "--examples", "1", "--output", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == ROWS
    assert rows["none"]["seconds"] > 0.35  # 45 MB per step at 1 Gb/s
    assert rows[LOCAL]["exposed"] == 0 and rows[LOCAL]["parameters"] > 11e6
    for row in rows.values():
        assert row["seconds"] > row["processor_seconds"]["main"] / 2 > 0 and row["coding"] > 0
    assert rows["auto"]["steps_to_decide"] and "compressed" in rows["auto"]["chosen"]
    # without an exchange, the compressor's threads have nothing to do
    assert rows[LOCAL]["processor_seconds"]["compressor"] < 1e-3
    assert rows[DEFAULT]["processor_seconds"]["compressor"] > 1e-3
