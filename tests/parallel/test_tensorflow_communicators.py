"""Every communicator on TensorFlow under the real horovodrun, on 2 and 3 ranks."""

import importlib.util

import pytest
from launch import Reports, scenarios

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports(
        "tensorflow_communicators.py", tmp_path_factory.mktemp("tensorflow_communicators")
    )


@pytest.mark.slow  # PyTorch's are not
@pytest.mark.parametrize("scenario", scenarios("tensorflow_communicators.py"))
@pytest.mark.parametrize("processes", [2, 3])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
