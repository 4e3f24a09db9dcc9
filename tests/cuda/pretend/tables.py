"""Test that embedding tables give the same results on a device and on the host, with two ranks.

The index codec differs, so the payloads do too.
"""

import horovod.torch as hvd
import torch

import deepreduce_hvd as dr

hvd.init()
ROWS, COLUMNS, STEPS, OVERFLOWS = 400, 8, 7, 3


def train(device, dtype):
    """Return [gradients of the optimizer and memories, for every step]."""
    parameters = {
        name: torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, device=device, dtype=dtype))
        for name in ("table", "layer")
    }
    compressor = dr.Compressor(parameters=parameters.items(), loss_scale=lambda: 1.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), compression=compressor
    )
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(1000 * step + hvd.rank())
        numbers = torch.randn(2, ROWS, COLUMNS, generator=random).to(dtype)
        used = torch.randint(ROWS, (30,), generator=random)
        if step == OVERFLOWS:
            numbers[0, used[0], 0] = torch.inf
        loss = (parameters["table"][used] * numbers[0, used].to(device)).sum()
        (loss + (parameters["layer"] * numbers[1].to(device)).sum()).backward()
        optimizer.synchronize()
        got = {name: parameter.grad.cpu().clone() for name, parameter in parameters.items()}
        with optimizer.skip_synchronize():
            if step != OVERFLOWS:
                optimizer.step()
        saved = compressor.state_dict()["parameters"]
        seen.append((got, {name: one["memory"]["residual"] for name, one in saved.items()}))
    policies = compressor.policies
    index = dr.Rice() if device != "cpu" else dr.RLE()
    assert policies["table"].codec == dr.Codec(dr.Threshold(0), index, dr.LloydMax(bits=4))
    assert policies["layer"].codec == dr.recommended_codec()
    left = [bool(memories["table"].any()) for _, memories in seen]
    assert left == [True] + [False] * (STEPS - 1), left
    return seen


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for step, (there, here) in enumerate(zip(train("cuda:0", dtype), train("cpu", dtype))):
        for kind, one, other in zip(("gradient", "residual"), there, here):
            for name in other:
                assert torch.equal(one[name].nan_to_num(), other[name].nan_to_num()), (
                    f"{dtype}, step {step}: another {kind} of {name}"
                )
print("as expected")
