"""What ranks must agree on, on stock Horovod and TensorFlow, on 2 and 3 ranks."""

import importlib.util

import pytest
from launch import Reports, scenarios

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("tensorflow_protocol.py", tmp_path_factory.mktemp("tensorflow_protocol"))


@pytest.mark.parametrize("scenario", scenarios("tensorflow_protocol.py"))
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
