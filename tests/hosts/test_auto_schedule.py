"""Test benchmarks/auto_schedule.py: fixed settings and schedule="auto" on 2 hosts."""

import json
import subprocess
import sys

import auto_schedule
import network
import pytest
from auto_schedule_rows import AUTO, FRAMEWORKS

_MISSING = network.problems()


@pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_of_a_framework(tmp_path, framework):
    path = tmp_path / "auto.json"
    command = [
        sys.executable, auto_schedule.__file__, "--links", "10mbit", "--frameworks", framework,
        "--turns", "1", "--features", "256", "--output", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(FRAMEWORKS[framework].rows)
    # 3.4 MB per step at 10 Mb/s, 1.7 MB as float16
    (none,) = (row for name, row in rows.items() if name.endswith("none"))
    (fp16,) = (row for name, row in rows.items() if name.endswith("fp16"))
    assert none["seconds"] > 2.6 and fp16["seconds"] > 1.3
    (auto,) = (row for name, row in rows.items() if name in AUTO)
    assert auto["seconds"] < none["seconds"] / 4 and "compressed" in auto["chosen"]
    assert auto["trials"] and all(trial["measured"] > 0 for trial in auto["trials"])
    assert path.with_suffix(".png").stat().st_size > 5000
