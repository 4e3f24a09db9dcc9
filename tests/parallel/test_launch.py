"""Test the time limit of jobs of ranks."""

import sys

import launch
import pytest

pytestmark = pytest.mark.slow

#: starts one scenario per pause
_WORKER = """
import sys, time
for scenario in range(4):
    print(time.strftime("%X"), f"scenario_{scenario}", flush=True)
    time.sleep(float(sys.argv[1]))
    print("Stalled ops", flush=True)
"""


def run(pause, timeout, monkeypatch):
    monkeypatch.setitem(launch.LAUNCHERS, "python", [sys.executable])
    return launch.run_ranks("python", "-c", _WORKER, pause, timeout=timeout)


def test_a_job_may_take_longer_than_the_limit_of_its_scenarios(monkeypatch):
    finished = run(2, 6, monkeypatch)
    assert finished.returncode == 0
    assert "scenario_3" in finished.stdout


def test_a_scenario_that_hangs_is_named(monkeypatch):
    with pytest.raises(AssertionError, match=r"within 5 s; it said:(?s:.*)scenario_0\n$"):
        run(600, 5, monkeypatch)
