"""Test that uncompressed messages and residuals on a device are those of the host.

With a real GPU, also that the host does not wait for it.
"""

import contextlib
import random

import torch

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.torch.slot import Slot

SHAPE = 30, 7
DEVICES = "cuda:0", "cpu"


@contextlib.contextmanager
def without_waiting():
    """Raise an error if the host waits for a real GPU."""
    if torch.version.cuda is None:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def slot_on(device):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE, device=device))
    return Slot("weight", parameter, 0, Policy("dense", None, dr.Residual()), True, device)


for seed in range(40):
    draw = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    dtype = draw.choice((torch.float32, torch.float16, torch.float64))
    slots = [slot_on(device) for device in DEVICES]
    for slot in slots:
        slot.state[0].copy_(torch.randn(210, generator=torch.Generator().manual_seed(seed)))
        slot.back_up()
    for _step in range(6):
        way = draw.choice(("dense", "dense", "fp16"))
        gradient = 10.0 ** draw.randint(-9, 4) * torch.randn(SHAPE, generator=numbers)
        gradient = gradient.to(dtype)
        if draw.random() < 0.3:
            gradient[3, 4] = draw.choice((float("nan"), float("inf")))
        message = torch.float16 if way == "fp16" else dtype
        divides = draw.random() < 0.5
        sent = []
        for slot, device in zip(slots, DEVICES):
            slot.policy = Policy(way, None, slot.policy.memory)
            own = gradient.to(device)
            with without_waiting() if device != "cpu" else contextlib.nullcontext():
                found = slot.with_memory(own, True, None, 3, message, divides)
            sent.append(found.to(message).cpu())
        where = seed, way, dtype, gradient.isfinite().all()
        assert torch.equal(*(one.view(torch.uint8) for one in sent)) or torch.equal(
            *(one.nan_to_num() for one in sent)
        ), where
        assert torch.equal(*(slot.state[0].cpu() for slot in slots)), where
        if draw.random() < 0.2:
            for slot in slots:
                slot.restore()
            assert torch.equal(*(slot.state[0].cpu() for slot in slots)), where
    # after the memory is empty, nothing is left to do
    for slot, device in zip(slots, DEVICES):
        slot.policy = Policy("dense", None, slot.policy.memory)
        for _step in range(6):  # an event of the pretended device is done at the second query
            gradient = torch.ones(SHAPE, device=device)
            found = slot.with_memory(gradient, True, None, 3, torch.float32, True)
            if device != "cpu" and torch.version.cuda is not None:
                torch.cuda.synchronize()
        assert found is gradient and not slot.remembers, (seed, device)
print("as expected")
