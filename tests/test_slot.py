"""Test what a parameter sends when it is sent uncompressed after it was compressed."""

import numpy as np
import pytest
import torch

import deepreduce_hvd as dr
from deepreduce_hvd.planning.measured_profile import Costs, totals
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.torch.pending import reduced_dtype
from deepreduce_hvd.torch.slot import Slot

LARGEST = 65504.0
#: dtype of the message, and whether the sum is divided in it: as Horovod does, and as DDP
HOROVOD, DDP = (torch.float16, True), (torch.float16, False)


def slot_with(residual, way):
    parameter = torch.nn.Parameter(torch.zeros(len(residual)))
    slot = Slot("weight", parameter, 0, Policy(way, None, dr.Residual()), keep_backup=False)
    slot.set_memory({"residual": np.array(residual, np.float32)})
    return slot


def message_of(slot, gradient, size=2, dtype=torch.float32, divides=True):
    return slot.with_memory(gradient, True, None, size, dtype, divides)


def average_of(messages, divides):
    """The average of float16 messages, divided as float16 or as float32, as float64."""
    total = np.zeros(len(messages[0]), np.float16)
    for message in messages:
        total = total + message.numpy()
    if divides:
        return (total.astype(np.float32) / len(messages)).astype(np.float16).astype(np.float64)
    return total.astype(np.float64) / len(messages)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_and_float16_does_not_overflow(size, seed):
    """Residuals of scaled losses are large: the sum of many steps."""
    draw = np.random.default_rng(seed)
    for way, dtype, divides in (("dense", torch.float32, True), ("fp16", *HOROVOD)):
        came = draw.normal(0, 6e4, 300).astype(np.float32)
        slot = slot_with(came, way)
        came, arrived = came.astype(np.float64), np.zeros(300)
        for _ in range(12):
            gradient = draw.normal(0, 300, 300).astype(np.float32)
            sent = message_of(slot, torch.from_numpy(gradient), size, dtype, divides).numpy()
            if way == "fp16":
                assert sent.dtype == np.float16 and (np.abs(sent) <= LARGEST / size).all()
            came, arrived = came + gradient, arrived + sent
            kept = slot.state[0].numpy()
            np.testing.assert_allclose(arrived + kept, came, atol=0.1)
            if way == "dense":
                assert not kept.any() and not slot.remembers


@pytest.mark.parametrize("dtype, divides", [HOROVOD, DDP])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("exponent", [-10, -9, -8, -7, -5, -2, 0, 2, 4, 6])
def test_averages_and_residuals_are_all_of_the_gradients(dtype, divides, size, exponent):
    """Float16 has no numbers below 6e-8 or above 65504, but gradients have; nothing is lost."""
    draw = np.random.default_rng(abs(exponent) * 100 + size)
    slots = [slot_with(np.zeros(200), "fp16") for _ in range(size)]
    # in the same direction in each step, or the sum over steps would say little
    direction = draw.standard_normal(200) * 10.0**exponent
    came, arrived = np.zeros(200), np.zeros(200)
    steps = 60
    for _ in range(steps):
        messages = []
        for slot in slots:
            gradient = (direction * draw.uniform(0, 2, 200)).astype(np.float32)
            came += gradient.astype(np.float64) / size
            messages.append(message_of(slot, torch.from_numpy(gradient), size, dtype, divides))
        average = average_of(messages, divides)
        assert np.isfinite(average).all()
        arrived += average
    kept = sum(slot.state[0].numpy().astype(np.float64) for slot in slots) / size
    lost = np.linalg.norm(came - arrived - kept) / np.linalg.norm(came)
    assert lost < 0.002 if size & (size - 1) == 0 or exponent > -5 else lost < 0.03
    # what is kept is less than one step, or the smallest number of which an average is left
    if exponent < 4:
        small = 2.0**-24 * 16 * (2 * size if divides else 1)
        assert np.abs(kept).max() < max(np.abs(direction).max(), small)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
def test_sums_of_float16_do_not_overflow_by_rounding(size):
    """65504 / 3 would be rounded up to 21840, and 3 times 21840 is beyond the range."""
    for divides in (True, False):
        slot = slot_with([6e4, -6e4], "fp16")
        sent = message_of(slot, torch.zeros(2), size, torch.float16, divides)
        total = np.zeros(2, np.float16)
        for _ in range(size):
            total += sent.numpy()
        assert np.isfinite(total).all() and np.abs(total).min() > 3e4


@pytest.mark.parametrize("way", ["dense", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_with_nan_is_sent_alone_and_the_memory_stays(way, dtype, seed):
    """As with a codec. So the residual is not lost if the program skips the step."""
    draw = np.random.default_rng(seed)
    before = draw.normal(0, 1, 50).astype(np.float32)
    slot = slot_with(before, way)
    gradient = torch.from_numpy(draw.normal(0, 1, 50)).to(dtype)
    gradient[int(draw.integers(50))] = draw.choice([np.nan, np.inf, -np.inf])
    message = reduced_dtype(dtype, way)
    assert message_of(slot, gradient, 2, message) is gradient
    np.testing.assert_array_equal(slot.state[0], before)
    # the next gradient takes it along
    sent = message_of(slot, torch.zeros(50, dtype=dtype), 2, message)
    assert sent.dtype == message
    np.testing.assert_allclose(sent.double() + slot.state[0].double(), before, rtol=1e-6)


def test_a_large_gradient_is_sent_in_parts():
    """A finite gradient beyond float16 is no error of the job."""
    slot = slot_with([0.0, 0.0], "fp16")
    gradient, arrived = torch.tensor([1e5, -3e5]), torch.zeros(2)
    sent = message_of(slot, gradient, 2, *HOROVOD)
    limit = float(sent[0])
    assert 3e4 < limit <= LARGEST / 2
    while slot.state[0].any():
        assert sent.isfinite().all()
        arrived += sent
        sent = message_of(slot, torch.zeros(2), 2, *HOROVOD)
    torch.testing.assert_close(arrived + sent, gradient, rtol=0, atol=0)


def test_without_a_memory_the_gradient_is_what_is_sent():
    slot = Slot("weight", torch.nn.Parameter(torch.zeros(2)), 0, Policy("fp16"), False)
    gradient = torch.tensor([1e9, 1e-9])
    assert message_of(slot, gradient, 2, *HOROVOD) is gradient


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
