"""Test benchmarks/more_ranks.py: predicted and measured steps of more and more ranks."""

import json
import subprocess
import sys

import more_ranks
import network
import pytest
from more_ranks_rows import COMMUNICATORS, DENSE, NONE

_MISSING = network.problems()
needs_hosts = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
ROWS = {NONE, DENSE, *COMMUNICATORS}


@needs_hosts
@pytest.mark.slow
def test_measured_and_predicted_steps(tmp_path):
    path = tmp_path / "ranks.json"
    command = [
        sys.executable, more_ranks.__file__, "--hosts", "2,3", "--steps", "4",
        "--output", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    for count in (2, 3):
        assert {row["row"] for row in rows if row["ranks"] == count and row["seconds"] > 0} == ROWS
    found = {(row["row"], row["ranks"]): row for row in rows}
    # 6 MB per step at 100 Mb/s; a busy machine only makes steps longer
    assert found[NONE, 2]["seconds"] > 0.4 and found[NONE, 3]["seconds"] > 0.5
    assert found[DENSE, 2]["predicted"] > 0.4
    assert max(row["ranks"] for row in rows) > 500
    assert path.with_suffix(".png").stat().st_size > 5000


def test_bad_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["more_ranks.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        more_ranks.main()
    assert "--steps: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", ["4,8", "2,x", ""])
def test_bad_hosts(hosts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["more_ranks.py", "--hosts", hosts])
    with pytest.raises(SystemExit):
        more_ranks.main()
    assert "--hosts: expected numbers such as 2,4,8" in capsys.readouterr().err
