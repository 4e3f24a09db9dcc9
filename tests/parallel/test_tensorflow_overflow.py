"""Steps that loss scaling skips, on TensorFlow with 2 and 3 ranks."""

import importlib.util

import pytest
from launch import Reports, scenarios

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("tensorflow_overflow.py", tmp_path_factory.mktemp("overflow"))


@pytest.mark.parametrize("scenario", scenarios("tensorflow_overflow.py"))
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
