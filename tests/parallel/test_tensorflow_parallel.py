"""Stock Horovod and TensorFlow on 2 and 3 ranks, under the real horovodrun."""

import importlib.util

import pytest
from launch import Reports, expect_failure_with_a_message_on_every_rank, scenarios

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


#: the first is started, and runs the others' scenarios too
MODULES = ("tensorflow_scenarios.py", "tensorflow_several.py", "tensorflow_variables.py")


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Both jobs in one directory, so that each finds the states that the other saved."""
    return Reports("tensorflow_scenarios.py", tmp_path_factory.mktemp("tensorflow_ranks"))


@pytest.mark.parametrize("scenario", [name for module in MODULES for name in scenarios(module)])
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            "a_codec_fails_on_one_rank",
            r"parameter (?:kernel\d|bias0): rank 1: InvalidArgumentError: values: expected good ones, got others",
        ),
        pytest.param(
            "slices_out_of_range_on_one_rank",
            r"parameter table: rank 1: slices: expected indices of 0 to 999, got 1000",
            marks=pytest.mark.slow,
        ),
        ("other_codec_on_one_rank", r"expected the same compressor configuration on every rank"),
        pytest.param(
            "other_process_set",
            r"expected Horovod to sum or average over the",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "min_as_the_operation", r"expected Horovod to sum or average", marks=pytest.mark.slow
        ),
        pytest.param(
            "adasum", r"[Aa]dasum|expected Horovod to sum or average", marks=pytest.mark.slow
        ),
        ("xla", r"expected a function without XLA, got one with jit_compile=True"),
        pytest.param(
            "unnamed_gradient",
            r"one of the 4 named parameters, got the gradient of kernel2:0, of shape \(40, 3\)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "unknown_shape",
            r"one of shape \(None, 16\), which could be that of a, b; name the variable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failure_ends_the_job_with_a_message_on_every_rank(failure, message):
    expect_failure_with_a_message_on_every_rank("tensorflow_failures.py", failure, message)
