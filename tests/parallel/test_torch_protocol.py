"""What ranks must agree on, on stock Horovod and PyTorch, on 2 and 3 ranks."""

import pytest
from launch import Reports, scenarios


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("torch_protocol.py", tmp_path_factory.mktemp("protocol"))


@pytest.mark.parametrize("scenario", scenarios("torch_protocol.py"))
@pytest.mark.parametrize("processes", [2, 3])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
