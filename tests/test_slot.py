"""Test what a parameter sends when it is sent uncompressed after it was compressed."""

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.planning.measured_profile import Costs, totals
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.torch.slot import Slot

LARGEST = 65504.0


def slot_with(residual, way):
    parameter = torch.nn.Parameter(torch.zeros(len(residual)))
    slot = Slot("weight", parameter, 0, Policy(way, None, dr.Residual()), keep_backup=False)
    slot.set_memory({"residual": np.array(residual, np.float32)})
    return slot


@pytest.mark.parametrize("way", ["dense", "fp16"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_and_float16_does_not_overflow(way, size, seed):
    """Residuals of scaled losses are large: the sum of many steps."""
    draw = np.random.default_rng(seed)
    came = draw.normal(0, 6e4, 300).astype(np.float32)
    slot = slot_with(came, way)
    came, arrived = came.astype(np.float64), np.zeros(300)
    for _ in range(12):
        gradient = draw.normal(0, 300, 300).astype(np.float32)
        sent = slot.with_memory(torch.from_numpy(gradient), True, None, size).numpy()
        if way == "fp16":
            assert (np.abs(sent) <= LARGEST / size).all()
        came, arrived = came + gradient, arrived + sent
        kept = slot.state[0].numpy()
        np.testing.assert_allclose(arrived + kept, came, atol=0.1)
        if way == "dense":
            assert not kept.any()
    if size == 1:
        assert not slot.remembers and not kept.any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
def test_sums_of_float16_do_not_overflow_by_rounding(size):
    """65504 / 3 would be rounded up to 21840, and 3 times 21840 is beyond the range."""
    sent = slot_with([6e4, -6e4], "fp16").with_memory(torch.zeros(2), True, None, size)
    total = np.zeros(2, np.float16)
    for _ in range(size):
        total += sent.numpy().astype(np.float16)
    assert np.isfinite(total).all() and np.abs(total).min() > 3e4


def test_a_gradient_out_of_range_is_sent_and_the_memory_stays():
    """The step is void on all ranks then."""
    slot = slot_with([5.0, 6.0, 7.0, 8.0], "fp16")
    gradient = torch.tensor([1.0, float("nan"), float("inf"), 1e6])
    sent = slot.with_memory(gradient, True, None, 2)
    torch.testing.assert_close(
        sent, torch.tensor([6.0, float("nan"), float("inf"), 1e6]), equal_nan=True
    )
    assert slot.state[0].tolist() == [0.0, 6.0, 7.0, 8.0]
    # with the next gradient, the rest is sent
    sent = slot.with_memory(torch.zeros(4), True, None, 2)
    assert sent.tolist() == [0.0, 6.0, 7.0, 8.0] and not slot.remembers


def test_the_mean_seconds_are_those_of_this_job():
    """A loaded state has the steps of another job, but not its seconds."""
    slot = slot_with([1.0, 2.0], "dense")
    slot.steps, slot.encode_seconds, slot.decode_seconds = 4, 8.0, 4.0
    assert slot.statistics()["encode_seconds"] == 2.0
    slot.set_steps(1_000_000)
    slot.steps += 4
    slot.encode_seconds, slot.decode_seconds = 24.0, 12.0
    row = slot.statistics()
    assert (row["encode_seconds"], row["decode_seconds"], row["steps"]) == (3.0, 1.5, 1_000_004)


@pytest.mark.parametrize("loaded", [0, 1_000_000])
def test_a_state_that_is_loaded_between_measurements_changes_no_cost(loaded):
    slot = slot_with([1.0, 2.0], "dense")
    slot.steps, slot.encode_seconds, slot.decode_seconds = 4, 8.0, 4.0
    before = totals({"weight": slot})["weight"]
    slot.set_steps(loaded)
    slot.steps += 2
    slot.encode_seconds, slot.decode_seconds = 14.0, 10.0
    found = Costs.of_steps(totals({"weight": slot})["weight"], before, slot)
    assert (found.encode, found.decode) == (3.0, 3.0)
