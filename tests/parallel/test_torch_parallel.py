"""Stock Horovod and PyTorch on 2 and 3 ranks, under the real horovodrun."""

import pytest
from launch import Reports, expect_failure_with_a_message_on_every_rank, scenarios


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Both jobs in one directory, so that each finds the states that the other saved."""
    return Reports("torch_scenarios.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", scenarios("torch_scenarios.py"))
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scenario(reports, processes, scenario):
    reports.expect_success(processes, scenario)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            "bad_gradient_type_on_one_rank",
            r"rank 1: InvalidArgumentError: gradient: expected torch\.float32, .*, got torch\.complex64",
        ),
        ("other_codec_on_one_rank", r"expected the same compressor configuration on every rank"),
        pytest.param(
            "other_k_in_rounds",
            r"expected the same compressor configuration on every rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other_communicator_on_one_rank",
            r"expected the same compressor configuration on every rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other_order_on_one_rank",
            r"expected the same compressor configuration on every rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other_layers_frozen_on_one_rank", r"freeze the same ones", marks=pytest.mark.slow
        ),
        ("adasum", r"expected a gradient, got a parameter, which op=Adasum passes"),
        pytest.param(
            "other_process_set",
            r"expected Horovod to sum or average over the 1 ranks of the compressor's process set",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "min_as_the_operation", r"expected Horovod to sum or average", marks=pytest.mark.slow
        ),
        pytest.param(
            "elastic_state_without_the_compressor",
            r"elastic training: expected an elastic state with the compressor",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "unnamed_gradient",
            r"expected the gradient of one of the 6 named parameters",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failure_ends_the_job_with_a_message_on_every_rank(failure, message):
    expect_failure_with_a_message_on_every_rank("torch_failures.py", failure, message)
