"""PyTorch's DDP on 2 and 3 ranks, with torchrun and without Horovod."""

import re

import pytest
import torch
from launch import horovodrun, scenario_tests, scenarios
from launch_torchrun import failure_tests, lines_of, torchrun

reports, test_scenario = scenario_tests(
    "ddp_scenarios.py",
    "ddp_states.py",
    "ddp_schedule.py",
    "ddp_uncompressed.py",
    "ddp_one_rank.py",
    "ddp_registration.py",
    "ddp_changes.py",
    "ddp_loss_scale.py",
    "ddp_unused.py",
    "ddp_misuse.py",
    run=torchrun,
    slow_scenarios=(
        "many_random_programs",
        "auto_starts_again_when_steps_change",
        "auto_with_an_embedding_table",
        "auto_with_steps_that_are_regularly_longer",
        "a_step_that_is_compiled_as_a_whole",
        "skipped_steps_of_several_passes_lose_nothing",
        "unused_parameters_stay_out_of_encoded_sums",
        *scenarios("ddp_misuse.py"),
    ),
    on_every_number=("members_of_other_groups", "all_ranks_get_the_whole_error_of_one"),
)

_OTHER_CONFIGURATION = r"expected the same compressor configuration on every rank"
#: not an error of torch.distributed: the rank that failed is alive and has told its cause
_TOLD = r"\A(?s:(?!.*(?:torch\.distributed failed|no sign of life)).*)"
_KILLED = r"from rank 1|[Cc]onnection (closed|reset) by peer"


said, test_every_rank_ends_with_the_cause = failure_tests(
    "ddp_failures.py",
    2,
    quick={
        "other_codec_on_one_rank": _OTHER_CONFIGURATION,
        "other_steps_on_one_rank": r"expected the same gradients in the same step on every rank",
        "encoding_that_fails_on_one_rank": (
            rf"{_TOLD}DeepReduceError: parameter branch.weight: InvalidArgumentError"
        ),
        "exception_in_backward_on_one_rank": r"LookupError: a bad batch",
        "payload_that_is_corrupt": r"CorruptPayloadError",
        "rank_that_is_killed": _KILLED,
    },
    slow={
        "other_dense_below_on_one_rank": rf"{_OTHER_CONFIGURATION}.*dense_below",
        "other_communicator_on_one_rank": _OTHER_CONFIGURATION,
        "loss_scale_that_fails_on_one_rank": rf"{_TOLD}KeyError: 'no scale today'",
        "rank_that_fails_before_sums_in_hosts": rf"{_TOLD}KeyError: 'no scale today'",
        "writer_that_fails_on_one_rank": rf"{_TOLD}OSError: the disk is full",
        "dense_gradients_that_fail_on_one_rank": r"'NoneType' object is not callable",
        "exception_on_one_rank": r"the data has ended",
        "other_order_on_one_rank": (
            rf"{_OTHER_CONFIGURATION}.*number 0=convolution\.weight .* on rank 0 and last\.bias"
        ),
        "other_buckets_on_one_rank": r"expected the same gradients in the same step on every rank",
        "other_layers_frozen_on_one_rank": r"DDP expects same model across all ranks",
        "compressor_on_one_rank_only": (
            r"expected all 2 ranks of the model to call register|Timed out waiting"
        ),
        "hook_of_pytorch_on_one_rank": (
            r"expected all 2 ranks of the model to call register|Timed out waiting"
        ),
        "rank_that_is_killed_between_rounds": _KILLED,
    },
)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job():
    finished = torchrun(2, "ddp_failures.py", "rank_that_is_killed", timeout=60)
    assert finished.returncode != 0
    assert "went on silently" not in finished.stdout


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        pytest.param(
            "rank_that_is_stopped", r"PeerFailedError.*Timed out waiting", marks=pytest.mark.slow
        ),
        pytest.param(
            "rank_that_hangs", r"PeerFailedError.*Timed out waiting", marks=pytest.mark.slow
        ),
        pytest.param(
            "step_without_synchronization_on_one_rank",
            r"rank 1 reached the end of its program after 2 steps",
            marks=pytest.mark.slow,
        ),
        ("rank_that_ends_early", r"rank 1 reached the end of its program after 2 steps"),
    ],
)
def test_the_remaining_rank_ends_with_the_cause(failure, message):
    # torchrun kills a rank that is stopped after 30 s
    finished = torchrun(2, "ddp_failures.py", failure, timeout=90)
    assert finished.returncode != 0
    said = lines_of(0, finished.stdout)
    assert re.search(message, said), f"rank 0 said:\n{said[-3000:]}"
    assert "went on silently" not in said


@pytest.mark.slow
def test_payloads_and_parameters_are_those_under_horovod(tmp_path):
    found = {}
    for kind, run in (("horovod", horovodrun), ("ddp", torchrun)):
        finished = run(2, "ddp_like_horovod.py", kind, tmp_path / kind, timeout=120)
        assert finished.returncode == 0, finished.stdout[-5000:]
        found[kind] = torch.load(tmp_path / kind)
    for case, compressed in {"default": 4, "quantized": 4, "plan": 3}.items():
        horovod, ddp = found["horovod"][case], found["ddp"][case]
        steps = list(zip(horovod["payloads"], ddp["payloads"]))
        assert len(steps) == 100
        for step, (one, other) in enumerate(steps):
            assert one.keys() == other.keys() and len(one) == compressed, case
            for name in one:
                assert torch.equal(one[name], other[name]), f"{case}, step {step}, {name}"
        for name, parameter in horovod["parameters"].items():
            assert torch.equal(parameter, ddp["parameters"][name]), f"{case}, {name}"


def test_trains_where_horovod_and_tensorflow_are_not_installed():
    finished = torchrun(2, "ddp_without_horovod.py", timeout=120)
    assert finished.returncode == 0, finished.stdout[-5000:]
    for rank in range(2):
        assert "trained without Horovod" in lines_of(rank, finished.stdout)
