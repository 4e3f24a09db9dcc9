"""Several optimizers, hvd.allreduce alone, sparse gradients, costs: PyTorch on 2 and 3 ranks."""

import pytest
from launch import Reports, scenarios


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    return Reports("torch_several.py", tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("scenario", scenarios("torch_several.py"))
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)
