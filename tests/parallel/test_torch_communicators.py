"""Every communicator under the real horovodrun, on 2, 3 and 4 ranks."""

import pytest
from launch import Reports, scenarios


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("torch_communicators.py", tmp_path_factory.mktemp("communicators"))


@pytest.mark.parametrize("scenario", scenarios("torch_communicators.py"))
@pytest.mark.parametrize(
    "processes",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
