"""Training with the dictionaries of GRACE and DeepReduce, on 2 ranks."""

import pytest
from launch import Reports, scenarios


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("torch_published.py", tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("scenario", scenarios("torch_published.py"))
def test_scenario(reports, scenario):
    reports.expect_success(2, scenario)
