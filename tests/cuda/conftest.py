"""Lets the tests here import what tests/ has; the schedules of the emulated device that they run
under.
"""

import pathlib
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parent)]

import emulation  # noqa: E402


@pytest.fixture(
    params=emulation.SCHEDULES, ids=lambda schedule: f"schedule{schedule[0]}-{schedule[1]}"
)
def schedule(request):
    emulation.set_schedule(*request.param)
    yield request.param
    emulation.set_schedule()
