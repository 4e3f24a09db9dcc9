"""Lets the tests here import what tests/ has; the schedules of the emulated device that they run
under.
"""

import emulation
import pytest


@pytest.fixture(
    params=emulation.SCHEDULES, ids=lambda schedule: f"schedule{schedule[0]}-{schedule[1]}"
)
def schedule(request):
    emulation.set_schedule(*request.param)
    yield request.param
    emulation.set_schedule()
